"""Double tree: two trees at once; each rank sends one half of the buffer on, and only receives the other.

In one binary tree, half of the ranks are leaves and never send. The second tree has its leaves where the first has
its inner ranks, and carries the other half of the buffer; rank 0 feeds both. 7 ranks:

    first half   0 ─▶ 4          second half   0 ─▶ 3            4, 2 and 6 pass the first half on,
                   ┌──┴──┐                       ┌──┴──┐         3, 5 and 1 the second
                   2     6                       5     1
                  ┌┴┐   ┌┘                      ┌┴┐   ┌┘
                  1 3   5                       6 4   2          (the first tree with rank r as 7 - r)

[1] Trees: in order, so that even ranks are inner and odd ones leaves; the second is the first reflected, or shifted by
    one where the number of ranks below the root is odd.
[2] Colours: every edge is red or blue, so that no rank has two edges of one colour coming in, or two going out.
    Red edges work in even rounds, blue ones in odd: a rank sends one message and receives one at a time.
[3] Rounds: each edge sends the next chunk that its upper end has, whenever its colour is on.

Cost: a broadcast or reduce of m chunks a tree takes 2 m + 2 h - 2 rounds or less, h = ceil(log2 p), each alpha +
n/(2m) beta; with the best m, sqrt((h - 1) n beta / (2 alpha)), that is near n beta for many bytes.

Bits: the root finishes everything and the others are sent copies. The two halves are added along different trees.

Source: P. Sanders, J. Speck and J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35, 2009. Their colouring takes O(log p) on each rank; here one walk colours all edges.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from samestep.collectives.plan import Plan, Rounds, Transfer, check_ranks
from samestep.collectives.rounds import rooted

__all__: list[str] = []


class Edge(NamedTuple):
    """From a rank to one below it in tree 0 or 1."""

    tree: int
    upper: int
    lower: int


def broadcast(ranks: int, root: int = 0, chunks: int = 8) -> Plan:
    """Returns the plan by which all ranks end with what `root` has, in `chunks` chunks a tree.

    >>> plan = broadcast(8, chunks=4)
    >>> plan.blocks, len(plan.rounds)
    (8, 12)
    """
    return rooted(f"double tree of {chunks}", "broadcast", ranks, 2 * chunks, _spread(ranks, chunks), root)


def reduce(ranks: int, root: int = 0, chunks: int = 8) -> Plan:
    """Returns the plan by which `root` ends with the sum; the others are left with parts of it."""
    return rooted(f"double tree of {chunks}", "reduce", ranks, 2 * chunks, _spread(ranks, chunks), root)


def all_reduce(ranks: int, chunks: int = 8) -> Plan:
    """Returns the plan by which all ranks end with the sum: a reduce, then a broadcast."""
    return rooted(f"double tree of {chunks}", "all_reduce", ranks, 2 * chunks, _spread(ranks, chunks))


def edges(ranks: int) -> list[Edge]:
    """Returns the edges of both trees below rank 0.

    >>> [edge[1:] for edge in edges(4) if edge.tree == 0]
    [(0, 2), (2, 1), (2, 3)]
    """
    below = ranks - 1
    first = _in_order(below)
    if below % 2:
        other = {rank: (rank - 2) % below + 1 for rank in range(1, ranks)}  # shifted by one
    else:
        other = {rank: ranks - rank for rank in range(1, ranks)}  # reflected
    other[0] = 0
    return [Edge(0, *pair) for pair in first] + [Edge(1, other[upper], other[lower]) for upper, lower in first]


def _in_order(below: int) -> list[tuple[int, int]]:
    """[1]: a rank's children are half its lowest set bit away; a right one that does not exist is nearer by half."""
    if not below:
        return []
    pairs = [(0, 1 << (below.bit_length() - 1))]
    for rank in range(2, below + 1, 2):
        reach = (rank & -rank) // 2
        pairs.append((rank, rank - reach))
        while reach and rank + reach > below:
            reach //= 2
        if reach:
            pairs.append((rank, rank + reach))
    return pairs


def colours(between: list[Edge]) -> dict[Edge, int]:
    """Returns [2]: 0 or 1 for each edge, so that those coming into a rank differ, and those going out.

    An edge must differ from one other at its upper end and one at its lower end at most. So all edges form paths and
    circles; along a circle the two kinds alternate, its length is even, and two colours are enough.
    """
    meeting: dict[tuple[str, int], list[Edge]] = defaultdict(list)
    for edge in between:
        meeting["out", edge.upper].append(edge)
        meeting["in", edge.lower].append(edge)
    colour: dict[Edge, int] = {}
    for start in between:
        waiting = [(start, 0)] if start not in colour else []
        while waiting:
            edge, own = waiting.pop()
            colour[edge] = own
            near = meeting["out", edge.upper] + meeting["in", edge.lower]
            waiting += [(other, 1 - own) for other in near if other not in colour]
    return colour


def _spread(ranks: int, chunks: int) -> Rounds:
    """[3]: until every edge has sent all chunks of its tree."""
    check_ranks(ranks)
    between = edges(ranks)
    colour = colours(between)
    has = {(tree, rank): chunks if rank == 0 else 0 for tree in (0, 1) for rank in range(ranks)}
    sent = dict.fromkeys(between, 0)
    rounds: list[tuple[Transfer, ...]] = []
    while min(has.values()) < chunks:
        on = [edge for edge in between if colour[edge] == len(rounds) % 2]
        ready = [edge for edge in on if sent[edge] < has[edge.tree, edge.upper]]
        rounds.append(())
        for edge in ready:
            block = edge.tree * chunks + sent[edge]
            rounds[-1] += (Transfer(edge.upper, edge.lower, block, block + 1),)
            sent[edge] += 1
            has[edge.tree, edge.lower] += 1
    return tuple(rounds)
