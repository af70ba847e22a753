"""An evaluation: every stage takes one micro-batch after another, and none comes back.

rank 0   F0  F1  F2  F3
rank 1       F0  F1  F2  F3
"""

from __future__ import annotations

from samestep.schedule.plan import Plan, actions, check_sizes, straight

__all__: list[str] = []


def forward_only(ranks: int, micro_batches: int) -> Plan:
    """Returns the plan.

    >>> len(forward_only(3, 4).in_time)
    12
    """
    check_sizes("forward only", ranks, micro_batches)
    orders = tuple(actions("F", stage, range(micro_batches)) for stage in range(ranks))
    return Plan("forward only", micro_batches, straight(ranks), orders)
