"""The schedules by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from samestep.errors import UsageError
from samestep.schedule.fill_drain import fill_drain
from samestep.schedule.interleaved import interleaved
from samestep.schedule.one_f_one_b import one_f_one_b
from samestep.schedule.plan import Schedule
from samestep.schedule.zero_bubble import zero_bubble

__all__: list[str] = []

STRAIGHT: dict[str, Callable[[int, int], Schedule]] = {  # one stage a rank
    "fill-drain": fill_drain,
    "1f1b": one_f_one_b,
    "eager-1f1b": partial(one_f_one_b, eager=True),
    "zero-bubble": zero_bubble,
}
SCHEDULE_NAMES = (*STRAIGHT, "interleaved")


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns the plan of a schedule.

    Args:
        name: one of NAMES.
        ranks: that hold stages.
        micro_batches: of a step.
        chunks: stages of each rank; more than one for "interleaved" alone.

    Raises:
        UsageError: there is no such schedule, or not of so many.

    Example:
        >>> make_schedule("1f1b", 2, 4).name
        '1F1B'
    """
    if name not in SCHEDULE_NAMES:
        raise UsageError(f"there is no schedule {name!r}: {', '.join(SCHEDULE_NAMES)}")
    if name == "interleaved":
        return interleaved(ranks, micro_batches, chunks=chunks)
    if chunks != 1:
        raise UsageError(f"{name} has one stage a rank; {chunks} are for 'interleaved'")
    return STRAIGHT[name](ranks, micro_batches)
