"""When a checkpoint is due: after so many steps, so much time, or at the end of epochs.

Steps and epochs are counted alike on every rank. Time is not: clocks differ, so only rank 0's counts, and what it
finds reaches the others in the reduction that every step has anyway.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from samestep.errors import UsageError

__all__ = ["Every", "parse_every"]

_UNITS_S = {"s": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+?)s?")


@dataclass(frozen=True)
class Every:
    """Exactly one of ``steps`` and ``seconds``, or neither: then checkpoints are due at the end of epochs only.

    Attributes:
        steps: due after every so many optimizer steps.
        seconds: due at the first step that ends so long after the last save.
        epochs: due at the end of every so many epochs, and of the last.
    """

    steps: int | None = None
    seconds: float | None = None
    epochs: int = 1


def parse_every(every: int | str | None) -> Every:
    """Reads ``every`` of :func:`samestep.checkpoint`.

    Raises:
        UsageError: it is none of the forms; lists them.

    Example:
        >>> parse_every(100)
        Every(steps=100, seconds=None, epochs=1)
        >>> parse_every("10 min")
        Every(steps=None, seconds=600.0, epochs=1)
        >>> parse_every("5 epochs")
        Every(steps=None, seconds=None, epochs=5)
    """
    if every is None:
        return Every()
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return Every(steps=every)
    if isinstance(every, str) and (parsed := _parse_text(every.strip().lower())) is not None:
        return parsed
    raise UsageError(
        f"every={every!r} says no interval; give a number of steps (100), a time ('30 s', '10 min', '2 h'), "
        "epochs ('1 epoch', '5 epochs'), steps ('100 steps'), or None for the end of each epoch"
    )


def parse_seconds(text: str) -> float | None:
    """Returns how many seconds a text like "90 min" means; None where it is no time."""
    parsed = _parse_text(text.strip().lower())
    return None if parsed is None else parsed.seconds


def _parse_text(text: str) -> Every | None:
    match = _FORM.fullmatch(text)
    if match is None or float(match[1]) == 0:
        return None
    amount, unit = float(match[1]), match[2]
    if unit in {"epoch", "step"}:
        if amount != int(amount):
            return None
        return Every(epochs=int(amount)) if unit == "epoch" else Every(steps=int(amount))
    return Every(seconds=amount * _UNITS_S[unit]) if unit in _UNITS_S else None
