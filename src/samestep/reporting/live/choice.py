"""What somebody who watches has chosen to see, and what the keys change in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.reporting.record import Run

__all__: list[str] = []

Panel = Literal["out", "err", "events"]
PAGE = 10  # ranks that page up and down move by

KEYS = (
    ("up k · down j", "the rank before, the next"),
    ("PgUp · PgDn", f"{PAGE} ranks up, down"),
    ("Home g · End G", "the first rank, the last"),
    ("n", "the next problem rank: slow, missing, failed"),
    ("Tab · o · e", "the rank's standard output, or standard error"),
    ("f", "events in full: hangs, stragglers, findings"),
    ("a", "another attempt of the run"),
    ("Space", "stop reading, and go on"),
    ("? h", "these keys"),
    ("q Ctrl-C", "leave; the run goes on"),
)


@dataclass(frozen=True)
class Seen:
    """What is on the screen when a key is pressed: whose, and what there is besides."""

    rank: int
    panel: Panel
    ranks: Sequence[int]
    attempts: Sequence[int]
    troubled: Callable[[], Sequence[int]]


@dataclass
class ViewState:
    """What somebody has chosen.

    Attributes:
        rank: whose output is shown; None leaves it to the run.
        panel: which of it, or what has happened instead; None likewise.
        attempt: of the run; None follows the latest.
        is_paused: nothing is read meanwhile.
        is_help: the keys are explained.
    """

    rank: int | None = None
    panel: Panel | None = None
    attempt: int | None = None
    is_paused: bool = False
    is_help: bool = False

    def shown_attempt(self, run: Run) -> int:
        """Returns the attempt that is seen."""
        latest = max(run.attempts, default=0)
        return latest if self.attempt is None or self.attempt not in run.attempts else self.attempt

    def press(self, key: str, seen: Seen) -> bool:
        """Obeys a key; returns whether to go on."""
        if self.is_help:
            self.is_help = False  # whatever the key
        elif key in {"tab", "o", "e", "f"}:
            self._show(key, seen.panel)
        elif key == " ":
            self.is_paused = not self.is_paused
        elif key == "a":
            self._other_attempt(seen.attempts)
        elif key in {"?", "h"}:
            self.is_help = True
        elif key == "q":
            return False
        elif key == "n":
            self._next_of(seen.troubled(), seen.rank)
        elif seen.ranks:
            self._move(key, seen.ranks, seen.rank)
        return True

    def _show(self, key: str, panel: Panel) -> None:
        if key == "tab":
            self.panel = "err" if panel == "out" else "out"
        elif key == "f":
            self.panel = "out" if panel == "events" else "events"
        else:
            self.panel = "out" if key == "o" else "err"

    def _other_attempt(self, attempts: Sequence[int]) -> None:
        """The one before, round to the latest, which is followed."""
        if attempts:
            now = attempts[-1] if self.attempt is None else self.attempt
            before = [each for each in attempts if each < now]
            self.attempt = before[-1] if before else None

    def _next_of(self, ranks: Sequence[int], now: int) -> None:
        if ranks:
            self.rank = next((rank for rank in ranks if rank > now), ranks[0])

    def _move(self, key: str, ranks: Sequence[int], now: int) -> None:
        last = len(ranks) - 1
        at = next((row for row, rank in enumerate(ranks) if rank >= now), last)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -PAGE, "pagedown": PAGE}
        ends = {"home": 0, "g": 0, "end": last, "G": last}
        if key in moves or key in ends:
            self.rank = ranks[min(last, max(0, ends.get(key, at + moves.get(key, 0))))]
