"""What a long search is at: one line on a terminal, which is written over and goes away at the end.

Behind a pipe nothing is said, and of several ranks only the first says anything.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from samestep.rankenv import read_rank_variables

__all__: list[str] = []

_EVERY = 0.1  # seconds, so that saying costs nothing beside what is measured


class ProgressLine:
    """Says on standard error what is being done.

    Example:
        >>> with ProgressLine() as telling:
        ...     for number in range(3):
        ...         telling.say(f"pass {number + 1} of 3")
    """

    def __init__(self) -> None:
        ranks = read_rank_variables()
        self._is_shown = sys.stderr.isatty() and (ranks is None or ranks.rank == 0)
        self._began, self._said = time.monotonic(), 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("")

    def say(self, what: str) -> None:
        """Says it, if nothing was said just now."""
        now = time.monotonic()
        if now - self._said >= _EVERY:
            self._said = now
            self._write(f"samestep: {now - self._began:4.0f} s  {what}")

    def _write(self, line: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
