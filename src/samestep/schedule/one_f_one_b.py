"""A backward as soon as there can be one, and a forward behind it (1F1B).

    rank 0   F0  F1  ──  B0  F2  B1  F3  B2  ──  B3          warm-up: 2 forwards, then one backward, one forward
    rank 1   ──  F0  B0  F1  B1  F2  B2  F3  B3              warm-up: 1

As many seconds as fill and drain where stages are alike, at most Σ(f + b) + (m - 1) max(f + b) where they are not, and
rank r of p holds p - r micro-batches and not all m of them.

Each rank waits for what it needs just before it needs it, so where a message takes c seconds, 1F1B loses about
2c(p - 1)m / p of them: more with every micro-batch. `eager` goes further ahead: with a warm-up of 2(p - 1 - r) + 1
there is always another micro-batch to do while one is under way, and 2(p - 1)c remain, as with fill and drain. Rank 0
then holds 2p - 1 micro-batches.

Sources: A. Harlap et al., "PipeDream", 2018; D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
ICML 2021.
"""

from __future__ import annotations

from itertools import chain

from samestep.schedule.plan import Action, Order, Schedule, actions, check_sizes, straight

__all__: list[str] = []


def one_f_one_b(ranks: int, micro_batches: int, *, eager: bool = False) -> Schedule:
    """Returns the plan.

    Args:
        ranks: with one stage each.
        micro_batches: of a step, fewer than ranks as well.
        eager: forward further ahead, for links on which messages take long.

    >>> plan = one_f_one_b(4, 8)
    >>> [plan.most_held(rank) for rank in range(4)]
    [4, 3, 2, 1]
    >>> plan = one_f_one_b(4, 8, eager=True)
    >>> [plan.most_held(rank) for rank in range(4)]
    [7, 5, 3, 1]
    """
    name = "eager 1F1B" if eager else "1F1B"
    check_sizes(name, ranks, micro_batches)
    warm_up = [2 * (ranks - 1 - rank) + 1 if eager else ranks - rank for rank in range(ranks)]
    orders = tuple(_order(stage, micro_batches, min(warm_up[stage], micro_batches)) for stage in range(ranks))
    return Schedule(name, micro_batches, straight(ranks), orders)


def _order(stage: int, micro_batches: int, warm_up: int) -> Order:
    pairs = zip(range(micro_batches), range(warm_up, micro_batches), strict=False)
    steady = chain.from_iterable((Action("B", stage, back), Action("F", stage, on)) for back, on in pairs)
    left = range(micro_batches - warm_up, micro_batches)
    return (*actions("F", stage, range(warm_up)), *steady, *actions("B", stage, left))
