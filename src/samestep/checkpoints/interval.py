"""When a checkpoint is due: after so many steps, so much time, or at the end of epochs.

Steps and epochs are counted alike on every rank. Time is not: clocks differ, so only rank 0's counts. It sends a
request to the other ranks with the report of every step; without such reports it is asked at every commit.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from samestep.errors import UsageError
from samestep.runtime.exchange import broadcast_json
from samestep.runtime.world import World

_UNITS_S = {"s": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+?)s?")


@dataclass(frozen=True)
class SaveInterval:
    """At most one of ``steps`` and ``seconds``; with neither, checkpoints are due at the end of epochs only."""

    steps: int | None = None  # due after every so many optimizer steps
    seconds: float | None = None  # due at the first step that ends so long after the last save
    epochs: int = 1  # due at the end of every so many epochs, and of the last


def parse_interval(every: int | str | None) -> SaveInterval:
    """Reads ``every`` of :func:`samestep.checkpoint`.

    >>> parse_interval(100)
    SaveInterval(steps=100, seconds=None, epochs=1)
    >>> parse_interval("10 min")
    SaveInterval(steps=None, seconds=600.0, epochs=1)
    >>> parse_interval("5 epochs")
    SaveInterval(steps=None, seconds=None, epochs=5)
    """
    if every is None:
        return SaveInterval()
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return SaveInterval(steps=every)
    if isinstance(every, str) and (parsed := _parse_text(every)) is not None:
        return parsed
    raise UsageError(
        f"every={every!r} says no interval; give a number of steps (100), a time ('30 s', '10 min', '2 h'), "
        "epochs ('1 epoch', '5 epochs'), steps ('100 steps'), or None for the end of each epoch"
    )


def parse_duration(text: str) -> float | None:
    """Returns how many seconds a text like "90 min" means; None where it is no time."""
    parsed = _parse_text(text)
    return None if parsed is None else parsed.seconds


def _parse_text(text: str) -> SaveInterval | None:
    match = _FORM.fullmatch(text.strip().lower())
    if match is None or float(match[1]) == 0:
        return None
    amount, unit = float(match[1]), match[2]
    if unit in {"epoch", "step"}:
        if amount != int(amount):
            return None
        return SaveInterval(epochs=int(amount)) if unit == "epoch" else SaveInterval(steps=int(amount))
    return SaveInterval(seconds=amount * _UNITS_S[unit]) if unit in _UNITS_S else None


class SaveTimer:
    """Tells when an interval is over, alike on every rank; `reports` says that data report every step."""

    def __init__(self, interval: SaveInterval, world: World, *, reports: bool) -> None:
        self._interval = interval
        self._world = world
        self._reports = reports
        self._requested = False
        self.restart()

    def request_if_late(self) -> None:
        """Requests a save on rank 0 where it is late; the request leaves with the report of the step that ends now."""
        if self._reports and self._world.is_first and not self._requested and self._is_late():
            self._world.step.request("save")
            self._requested = True

    def is_due(self, step: int) -> bool:
        """Whether all ranks save now: decided by a count they share, or by rank 0's request."""
        if self._interval.steps is not None and step % self._interval.steps == 0:
            return True
        if self._reports:
            return "save" in self._world.step.agreed
        return self._interval.seconds is not None and bool(broadcast_json(self._world.everyone, self._is_late()))

    def reset_request(self) -> None:
        """Takes back what was agreed: it is being done."""
        self._world.step.agreed -= {"save"}
        self._requested = False

    def restart(self) -> None:
        """Counts the time anew; after a save that failed too: a full disk is not tried again at every step."""
        self._saved_at = time.monotonic()

    def _is_late(self) -> bool:
        return self._interval.seconds is not None and time.monotonic() - self._saved_at >= self._interval.seconds
