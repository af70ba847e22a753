"""Promises of seconds: held to by `make prove`; `make test`, which may run beside anything, looks for a minute more."""

from __future__ import annotations

__all__ = ["BUSY", "hold_to", "in_time"]

BUSY = 60.0  # seconds that a busy machine may add: what waits for a time-out takes longer
_leeway = {"seconds": BUSY}


def hold_to(leeway: float) -> None:
    """Sets how many seconds above its limit a time may be."""
    _leeway["seconds"] = leeway


def in_time(took: float, limit: float) -> bool:
    """Tells whether something took no longer than was promised."""
    return took < limit + _leeway["seconds"]
