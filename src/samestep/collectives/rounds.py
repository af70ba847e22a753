"""Rounds made of rounds: reversed, mapped to other ranks and blocks, run in parallel.

A reduce is a broadcast run backwards with its arrows turned; a torus is rings on its rows and columns; a plan over
7 ranks is a plan over 4 with 3 ranks that only send and receive at the ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from samestep.collectives.plan import Operation, Plan, Rounds, Transfer, check_ranks

__all__: list[str] = []


def reversed_rounds(rounds: Rounds) -> Rounds:
    """Returns the rounds from last to first, every transfer in the other direction and added.

    What brought one rank's blocks to all others now sums theirs on it, in the same time.

    >>> reversed_rounds(((Transfer(0, 1, 0, 1),), (Transfer(1, 2, 0, 1),)))[0]
    (Transfer(source=2, target=1, begin=0, end=1, adds=True),)
    """
    return tuple(
        tuple(Transfer(one.target, one.source, one.begin, one.end, adds=True) for one in transfers)
        for transfers in reversed(rounds)
    )


def remap(rounds: Rounds, ranks: Sequence[int], edges: Sequence[int]) -> Rounds:
    """Returns the rounds with `ranks[i]` for rank i, and the blocks [edges[b], edges[b + 1]) for block b.

    >>> remap(((Transfer(0, 1, 0, 2),),), ranks=[5, 3], edges=[0, 4, 8])
    ((Transfer(source=5, target=3, begin=0, end=8, adds=False),),)
    """
    return tuple(
        tuple(
            Transfer(ranks[one.source], ranks[one.target], edges[one.begin], edges[one.end], one.adds)
            for one in transfers
        )
        for transfers in rounds
    )


def in_parallel(plans: Sequence[Rounds]) -> Rounds:
    """Returns the first rounds of all as one round, then the second rounds, and so on.

    >>> in_parallel([((Transfer(0, 1, 0, 1),),), ((Transfer(2, 3, 0, 1),), (Transfer(3, 2, 1, 2),))])[1]
    (Transfer(source=3, target=2, begin=1, end=2, adds=False),)
    """
    together = zip_longest(*plans, fillvalue=())
    return tuple(tuple(one for transfers in rounds for one in transfers) for rounds in together)


def with_root(rounds: Rounds, ranks: int, root: int) -> Rounds:
    """Returns the rounds with `root` for rank 0, and for every other rank the one as far behind it."""
    blocks = max((one.end for transfers in rounds for one in transfers), default=0)
    return remap(rounds, [(rank + root) % ranks for rank in range(ranks)], range(blocks + 1))


def rooted(name: str, operation: Operation, ranks: int, blocks: int, spread: Rounds, root: int = 0) -> Plan:
    """Returns a broadcast, a reduce or an all-reduce made of rounds that spread rank 0's blocks to all."""
    if operation == "all_reduce":
        return Plan(name, operation, ranks, blocks, reversed_rounds(spread) + spread)
    rounds = spread if operation == "broadcast" else reversed_rounds(spread)
    return Plan(name, operation, ranks, blocks, with_root(rounds, ranks, root), root)


class PowerOfTwoFold:
    """A number of ranks folded to a power of two: the first ranks pair up, and one of each pair is idle.

        7 ranks      0 ◀─ 1     2 ◀─ 3     4 ◀─ 5     6          before: 1, 3 and 5 send everything, then wait
        members      0          1          2          3          4 of them go through the algorithm
                     0 ─▶ 1     2 ─▶ 3     4 ─▶ 5     6          after: 1, 3 and 5 are sent the result

    Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH",
    IJHPCA 19, 2005.

    Attributes:
        members: the ranks that take part, a power of two of them.
        idle: the ranks that do not, each one behind the member that stands for it.
    """

    def __init__(self, ranks: int) -> None:
        check_ranks(ranks)
        power = 1 << (ranks.bit_length() - 1)
        extra = ranks - power
        self.members = [*range(0, 2 * extra, 2), *range(2 * extra, ranks)]
        self.idle = range(1, 2 * extra, 2)

    def gather(self, begins: Sequence[int], ends: Sequence[int], *, adds: bool) -> Rounds:
        """Returns the round in which the idle ranks send their blocks [begins[rank], ends[rank]); none if all go on."""
        transfers = tuple(Transfer(one, one - 1, begins[one], ends[one], adds) for one in self.idle)
        return (transfers,) if transfers else ()

    def scatter(self, begins: Sequence[int], ends: Sequence[int]) -> Rounds:
        """Returns the round in which the idle ranks are sent blocks [begins[rank], ends[rank]); none if all go on."""
        transfers = tuple(Transfer(one - 1, one, begins[one], ends[one]) for one in self.idle)
        return (transfers,) if transfers else ()
