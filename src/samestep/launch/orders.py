"""What the launcher may order a rank to do, and who in the rank obeys: the rank's side of the control pipe.

    preempt   save at the next step that all ranks agree on, and leave with exit code 75
    standing  no order: how the ranks stand, for whoever draws the progress

The pipe itself is read by :mod:`samestep.launch.control`, on a thread of its own: a signal would end the workers of a
DataLoader, or interrupt a collective. Whoever can obey registers here; where nobody has, the launcher falls back on
the signal that it got.
"""

from __future__ import annotations

from collections.abc import Callable

__all__: list[str] = []

Obey = Callable[[int], None]  # gets the number of the signal that made the launcher give the order

_preemption: list[Obey] = []
_standing = [""]


def when_preempted(obey: Obey | None) -> None:
    """Names who saves and leaves when this rank is to be preempted; None: nobody any more.

    `obey` is called on a thread other than the main one, and must return at once.
    """
    _preemption[:] = [] if obey is None else [obey]


def preempt(number: int) -> bool:
    """Passes the order on; returns False where nobody in this process can obey it."""
    for obey in _preemption:
        obey(number)
    return bool(_preemption)


def note_standing(text: str) -> None:
    """Keeps what the launcher has found out about the ranks' pace."""
    _standing[0] = text


def standing() -> str:
    """Returns it: "waiting 31%  slowest rank 2 (1.4x)"; "" where nobody has found out anything."""
    return _standing[0]
