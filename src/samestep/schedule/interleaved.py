"""Several stages a rank, dealt in turn: while one waits for its neighbours, another has work.

    stage     0   1   2   3                     p = 2 ranks, v = 2 stages each
    rank      0   1   0   1

    rank 0   F0.0  F0.1  F2.0  F2.1  ──    B2.0  B2.1  B0.0  B0.1
    rank 1   ──    F1.0  F1.1  F3.0  B3.0  F3.1  B3.1  B1.0  B1.1

Micro-batches go through in groups of p or more: a group through the first stage of a rank, then through its second, and
so on.
The time that ranks stand still shrinks to a v-th, (p - 1)(f + b) / v with f and b a rank's whole work, for v times as
many messages.

Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
It wants micro-batches in multiples of p; here groups may be larger, and one larger than another.
"""

from __future__ import annotations

from itertools import chain

from samestep.schedule.plan import Action, Order, Schedule, check_sizes
from samestep.topology import cut_evenly

__all__: list[str] = []


def interleaved(ranks: int, micro_batches: int, *, chunks: int = 2) -> Schedule:
    """Returns the plan.

    Args:
        ranks: that hold stages.
        micro_batches: of a step.
        chunks: stages of each rank.

    >>> interleaved(2, 4).placement
    (0, 1, 0, 1)
    """
    check_sizes("interleaved", ranks, micro_batches, chunks)
    placement = tuple(stage % ranks for stage in range(ranks * chunks))
    orders = tuple(_order(rank, ranks, micro_batches, chunks) for rank in range(ranks))
    return Schedule(f"interleaved x{chunks}", micro_batches, placement, orders)


def _order(rank: int, ranks: int, micro_batches: int, chunks: int) -> Order:
    groups = cut_evenly(micro_batches, max(1, micro_batches // ranks))
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action("F", stage, one) for group in groups for stage in stages for one in range(*group)]
    backwards = [Action("B", stage, one) for group in groups for stage in stages[::-1] for one in range(*group)]
    largest = max(end - begin for begin, end in groups)
    warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * largest, len(forwards))
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])
