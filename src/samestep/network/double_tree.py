"""The rounds of a double tree, by rule: one tree for each half of the buffer, so that every rank's port is busy.

In m chunks it needs no walk through its rounds. An edge passes chunk k in round first + 2k, counted downward:

    first of an edge    the first round of the edge's colour behind the first of the edge above it
    round t             the edges whose first is t, t - 2, t - 4, ... and that have not sent all m

so that, m being more than the tree is high, two rounds in the middle come over and over. Upward all goes backwards, and
what a rank adds may wait for the next round unless it is passed on in it, or down again where that is the first.

Source: that of :mod:`samestep.collectives.double_tree`, whose plans the tests compare these rounds with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from samestep.errors import UsageError
from samestep.network.rounds import Round

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Ints

__all__: list[str] = []


def all_reduce(ranks: int, nbytes: float, chunks: int = 8) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.double_tree.all_reduce`.

    Raises:
        UsageError: fewer than 1 rank or chunk.
    """
    _check(ranks, chunks)
    if ranks == 1:
        return
    edges, each = _edges(ranks), nbytes / (2 * chunks)
    high = int(edges.first.max())
    numbers = [*range(high + 2 * chunks - 1)]
    on = {number: edges.on(number, chunks) for number in numbers if not high + 2 <= number < 2 * chunks}
    for number in numbers[high + 2 : 2 * chunks]:
        on[number] = on[number - 2]  # all edges of a colour, over and over
    yield from _repeated(reversed(numbers), on, partial(_up, edges, each))
    yield from _repeated(numbers, on, partial(_down, edges, each))


def _repeated(numbers: Iterable[int], on: dict[int, Ints], make: Callable[[Ints, int], Round]) -> Iterator[Round]:
    """Yields a round for each number, the same object where the edges are."""
    made: dict[int, Round] = {}
    for number in numbers:
        key = id(on[number]) if number else -1  # what goes down first has been added before
        if key not in made:
            made[key] = make(on[number], number)
        yield made[key]


def _up(edges: Edges, each: float, on: Ints, number: int) -> Round:
    import numpy as np

    hidden = not edges.passed_on(on, number)
    return Round(edges.lower[on], edges.upper[on], np.full(len(on), each), adds=each, hidden=hidden)


def _down(edges: Edges, each: float, on: Ints, _number: int) -> Round:
    import numpy as np

    return Round(edges.upper[on], edges.lower[on], np.full(len(on), each))


class Edges(NamedTuple):
    """Of both trees.

    Attributes:
        upper: the rank that each comes from.
        lower: the rank that each leads to.
        first: the round in which its first chunk passes, on the way down.
        above: the first of the edge that leads to the upper rank; -1 at the root.
    """

    upper: Ints
    lower: Ints
    first: Ints
    above: Ints

    def on(self, number: int, chunks: int) -> Ints:
        """Returns the edges that a chunk passes in a round."""
        since = number - self.first
        on: Ints = ((since >= 0) & (since % 2 == 0) & (since < 2 * chunks)).nonzero()[0]
        return on

    def passed_on(self, on: Ints, number: int) -> bool:
        """Returns whether a chunk that comes up in a round goes on in the next, or down again where that is the first.

        What goes up takes the rounds backwards: from an edge to the one above it, which comes as much later.
        """
        return bool((self.first[on] - self.above[on] == 1)[self.above[on] >= 0].any()) or number == 0


def _edges(ranks: int) -> Edges:
    """Of both trees, those nearest the root first in either, coloured as the plan does it."""
    import numpy as np

    pairs = _in_order(ranks - 1)
    below, both = ranks - 1, np.arange(ranks)
    other = np.where(both > 0, (both - 2) % below + 1 if below % 2 else ranks - both, 0)
    upper, lower = (np.concatenate([rank, other[rank]]) for rank in pairs)
    colour = _colours(upper, lower)
    first, above = np.zeros(len(upper), dtype=np.int64), np.full(len(upper), -1)
    for edges in (np.arange(below), np.arange(below, 2 * below)):
        to = np.full(ranks, -1)
        for level in _levels(upper[edges], lower[edges], ranks):
            mine = edges[level]
            above[mine] = to[upper[mine]]
            first[mine] = above[mine] + 1 + (above[mine] + 1 + colour[mine]) % 2
            to[lower[mine]] = first[mine]
    return Edges(upper, lower, first, above)


def _in_order(below: int) -> tuple[Ints, Ints]:
    """The first tree's edges, in the plan's order: from 0, then from each even rank to the left and to the right."""
    import numpy as np

    rank = np.arange(2, below + 1, 2)
    reach = (rank & -rank) // 2
    right = reach.copy()
    while (far := rank + right > below).any() and right[far].any():
        right[far] //= 2
    root = np.array([1 << (below.bit_length() - 1)])
    lower = np.stack([rank - reach, np.where((right > 0) & (rank + right <= below), rank + right, -1)], axis=1)
    upper, lower = np.concatenate([[0], np.repeat(rank, 2)]), np.concatenate([root, lower.reshape(-1)])
    return upper[lower >= 0], lower[lower >= 0]


def _levels(upper: Ints, lower: Ints, ranks: int) -> Iterator[Ints]:
    """Yields the edges of a tree by their distance from rank 0."""
    import numpy as np

    reached, waiting = np.arange(ranks) == 0, np.arange(len(upper))
    while len(waiting):
        now = reached[upper[waiting]]
        yield waiting[now]
        reached[lower[waiting[now]]] = True
        waiting = waiting[~now]


def _colours(upper: Ints, lower: Ints) -> Ints:
    """Alternating along every path or circle of edges that meet, from the first in order, as the plan has it."""
    import numpy as np

    near = np.stack([_partners(upper), _partners(lower)], axis=1).tolist()
    colour = [-1] * len(upper)
    for start in range(len(near)):
        waiting = [(start, 0)] if colour[start] < 0 else []
        while waiting:
            edge, own = waiting.pop()
            colour[edge] = own
            waiting += [(each, 1 - own) for each in near[edge] if each >= 0 and colour[each] < 0]
    return np.array(colour)


def _partners(ends: Ints) -> Ints:
    """The other edge that has the same end, of two at most; -1 where there is none."""
    import numpy as np

    order = np.argsort(ends, kind="stable")
    twins = np.nonzero(ends[order][1:] == ends[order][:-1])[0]
    partners = np.full(len(ends), -1)
    partners[order[twins]], partners[order[twins + 1]] = order[twins + 1], order[twins]
    return partners


def _check(ranks: int, chunks: int) -> None:
    if ranks < 1 or chunks < 1:
        raise UsageError(f"a double tree of {ranks} ranks in {chunks} chunks: give 1 or more of both")
