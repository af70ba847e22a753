"""All forwards, then all backwards: the pipeline fills, and drains.

    rank 0   F0  F1  F2  F3  ──  ──  B0  B1  B2  B3
    rank 1   ──  F0  F1  F2  F3  B0  B1  B2  B3  ──

The simplest, and the oracle of the others. Every rank holds the activations of all micro-batches. With forwards of f
and backwards of b seconds a step takes Σ(f + b) + (m - 1)(max f + max b): exactly, however unlike the stages are.

Source: Y. Huang et al., "GPipe", NeurIPS 2019.
"""

from __future__ import annotations

from samestep.schedule.plan import Schedule, actions, check_sizes, straight

__all__: list[str] = []


def fill_drain(ranks: int, micro_batches: int) -> Schedule:
    """Returns the plan.

    >>> [str(action) for action in fill_drain(2, 2).orders[1]]
    ['F1.0', 'F1.1', 'B1.0', 'B1.1']
    """
    check_sizes("fill and drain", ranks, micro_batches)
    each = range(micro_batches)
    orders = tuple(actions("F", stage, each) + actions("B", stage, each) for stage in range(ranks))
    return Schedule("fill-drain", micro_batches, straight(ranks), orders)
