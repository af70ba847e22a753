"""An evaluation: every stage takes one micro-batch after another, and none comes back.

rank 0   F0  F1  F2  F3
rank 1       F0  F1  F2  F3

With several stages a rank, all micro-batches go through its first, then all through its second.
"""

from __future__ import annotations

from samestep.schedule.plan import Schedule, actions, check_sizes

__all__: list[str] = []


def forward_only(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns the plan.

    Args:
        ranks: that hold stages.
        micro_batches: of a batch.
        chunks: stages of each rank.

    >>> len(forward_only(3, 4).in_time)
    12
    """
    check_sizes("forward only", ranks, micro_batches, chunks)
    placement = tuple(stage % ranks for stage in range(ranks * chunks))
    orders = [
        sum((actions("F", stage, range(micro_batches)) for stage in range(rank, ranks * chunks, ranks)), ())
        for rank in range(ranks)
    ]
    return Schedule("forward only", micro_batches, placement, tuple(orders))
