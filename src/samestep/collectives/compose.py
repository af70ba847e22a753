"""Plans made of plans: turned round, put on other ranks and blocks, run side by side.

A reduce is a broadcast run backwards with its arrows turned; a torus is rings on its rows and columns; a plan over
7 ranks is a plan over 4 with 3 ranks leaning on others. Each algorithm's file says only what is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from samestep.collectives.plan import Round, Rounds, Transfer

__all__: list[str] = []


def backwards(rounds: Rounds) -> Rounds:
    """Returns the rounds from last to first, every transfer going the other way and added.

    What handed one rank's blocks to all others now brings theirs together on it, in the same time.

    >>> backwards(((Transfer(0, 1, 0, 1),), (Transfer(1, 2, 0, 1),)))[0]
    (Transfer(source=2, target=1, begin=0, end=1, adds=True),)
    """
    return tuple(
        tuple(Transfer(one.target, one.source, one.begin, one.end, adds=True) for one in transfers)
        for transfers in reversed(rounds)
    )


def placed(rounds: Rounds, ranks: Sequence[int], edges: Sequence[int]) -> Rounds:
    """Returns the rounds with rank i played by `ranks[i]`, and block b being the blocks [edges[b], edges[b + 1]).

    >>> placed(((Transfer(0, 1, 0, 2),),), ranks=[5, 3], edges=[0, 4, 8])
    ((Transfer(source=5, target=3, begin=0, end=8, adds=False),),)
    """
    return tuple(
        tuple(
            Transfer(ranks[one.source], ranks[one.target], edges[one.begin], edges[one.end], one.adds)
            for one in transfers
        )
        for transfers in rounds
    )


def side_by_side(plans: Sequence[Rounds]) -> Rounds:
    """Returns the first rounds of all as one round, then the second rounds, and so on.

    >>> side_by_side([((Transfer(0, 1, 0, 1),),), ((Transfer(2, 3, 0, 1),), (Transfer(3, 2, 1, 2),))])[1]
    (Transfer(source=3, target=2, begin=1, end=2, adds=False),)
    """
    together = zip_longest(*plans, fillvalue=())
    return tuple(tuple(one for transfers in rounds for one in transfers) for rounds in together)


def rotated(rounds: Rounds, ranks: int, root: int) -> Rounds:
    """Returns the rounds with rank 0's part played by `root`, and everybody else's by the rank as far behind it."""
    blocks = max((one.end for transfers in rounds for one in transfers), default=0)
    return placed(rounds, [(rank + root) % ranks for rank in range(ranks)], range(blocks + 1))


class Fold:
    """A number of ranks brought down to a power of two: the first ranks pair up, and one of each pair sits out.

        7 ranks      0 ◀─ 1     2 ◀─ 3     4 ◀─ 5     6          before: 1, 3 and 5 send everything, then wait
        members      0          1          2          3          4 of them go through the algorithm
                     0 ─▶ 1     2 ─▶ 3     4 ─▶ 5     6          after: 1, 3 and 5 are sent the result

    Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH",
    IJHPCA 19, 2005.

    Attributes:
        members: the ranks that go on, a power of two of them.
        idle: the ranks that sit out, each one behind the member it leans on.
    """

    def __init__(self, ranks: int) -> None:
        power = 1 << (ranks.bit_length() - 1)
        extra = ranks - power
        self.members = [*range(0, 2 * extra, 2), *range(2 * extra, ranks)]
        self.idle = range(1, 2 * extra, 2)

    def gather(self, begins: Sequence[int], ends: Sequence[int], *, adds: bool) -> Rounds:
        """Returns the round in which the idle ranks send their blocks [begins[rank], ends[rank]); none if all go on."""
        return _unless_empty(tuple(Transfer(one, one - 1, begins[one], ends[one], adds) for one in self.idle))

    def scatter(self, begins: Sequence[int], ends: Sequence[int]) -> Rounds:
        """Returns the round in which the idle ranks are sent blocks [begins[rank], ends[rank]); none if all go on."""
        return _unless_empty(tuple(Transfer(one - 1, one, begins[one], ends[one]) for one in self.idle))


def _unless_empty(transfers: Round) -> Rounds:
    return (transfers,) if transfers else ()
