"""What fake GPUs say, once a process: that they are on, and by name what a script uses that they do not fake."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from samestep.rankenv import variable

__all__ = ["not_faked", "say_once"]

_said: set[str] = set()


def say_once(name: str, instead: str) -> None:
    """Says in one line that something is not faked, and what happens instead; on the first rank only."""
    if name not in _said:
        _said.add(name)
        if (variable("RANK") or "0") == "0":
            print(f"samestep: fake GPUs do not fake {name}: {instead}", file=sys.stderr, flush=True)


def not_faked(name: str, advice: str) -> Any:
    """Returns something that says, where a script calls it, that it is not faked.

    Calling it raises NotImplementedError.
    """

    def call(*_args: Any, **_named: Any) -> NoReturn:
        say_once(name, advice)
        raise NotImplementedError(f"fake GPUs do not fake {name}: {advice}")

    return call
