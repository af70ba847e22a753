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

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from samestep.collectives.plan import Plan
from samestep.network.messages import Ints, Messages, reverse, send, with_root


class Edges(NamedTuple):
    """Edges from a rank to one below it: all of the first tree, then all of the second."""

    tree: Ints  # 0 or 1
    upper: Ints  # the rank above
    lower: Ints  # the rank below


def broadcast(ranks: int, root: int = 0, chunks: int = 8) -> Plan:
    """Returns the plan by which all ranks end with what `root` has, in `chunks` chunks a tree.

    >>> plan = broadcast(8, chunks=4)
    >>> plan.blocks, len(plan.rounds)
    (8, 12)
    """
    make_rounds = partial(_from, ranks, root, chunks)
    return Plan(_name(chunks), "broadcast", ranks, 2 * chunks, make_rounds, root)


def reduce(ranks: int, root: int = 0, chunks: int = 8) -> Plan:
    """Returns the plan by which `root` ends with the sum; the others are left with parts of it."""
    return Plan(_name(chunks), "reduce", ranks, 2 * chunks, lambda: reverse(_from(ranks, root, chunks)), root)


def all_reduce(ranks: int, chunks: int = 8) -> Plan:
    """Returns the plan by which all ranks end with the sum: a reduce, then a broadcast."""

    def rounds() -> list[Messages]:
        spread = list(_spread(ranks, chunks))
        return [*reverse(spread), *spread]

    return Plan(_name(chunks), "all_reduce", ranks, 2 * chunks, rounds)


def edges(ranks: int) -> Edges:
    """Returns the edges of both trees below rank 0.

    >>> [pair for tree, *pair in zip(*(each.tolist() for each in edges(4))) if tree == 0]
    [[0, 2], [2, 1], [2, 3]]
    """
    below, rank = ranks - 1, np.arange(ranks)
    other = (rank - 2) % below + 1 if below % 2 else ranks - rank  # shifted by one, or reflected
    other[0] = 0
    upper, lower = _in_order(below)
    return Edges(
        np.repeat([0, 1], len(upper)), np.concatenate([upper, other[upper]]), np.concatenate([lower, other[lower]])
    )


def _in_order(below: int) -> tuple[Ints, Ints]:
    """[1]: a rank's children are half its lowest set bit away; a right one that does not exist is nearer by half."""
    rank = np.arange(2, below + 1, 2)
    reach = (rank & -rank) // 2
    right = reach.copy()
    while (far := (rank + right > below) & (right > 0)).any():
        right[far] //= 2
    children = np.stack([rank - reach, np.where(right > 0, rank + right, -1)], axis=1).ravel()
    upper = np.append(0, np.repeat(rank, 2))
    lower = np.append(1 << (below.bit_length() - 1), children)
    return upper[lower >= 0], lower[lower >= 0]


def colours(between: Edges) -> Ints:
    """Returns [2]: 0 or 1 for each edge, so that those coming into a rank differ, and those going out.

    An edge must differ from one other at its upper end and one at its lower end at most. So all edges form paths and
    circles; along a circle the two kinds alternate, its length is even, and two colours are enough.
    """
    near = np.stack([_partners(between.upper), _partners(between.lower)], axis=1).tolist()
    colour = [-1] * len(near)
    for start in range(len(near)):
        waiting = [(start, 0)] if colour[start] < 0 else []
        while waiting:
            edge, own = waiting.pop()
            colour[edge] = own
            waiting += [(other, 1 - own) for other in near[edge] if other >= 0 and colour[other] < 0]
    return np.array(colour)


def _partners(ends: Ints) -> Ints:
    """The other edge that has the same end, of two at most; -1 where there is none."""
    order = np.argsort(ends, kind="stable")
    twins = np.nonzero(ends[order][1:] == ends[order][:-1])[0]
    partners = np.full(len(ends), -1)
    partners[order[twins]], partners[order[twins + 1]] = order[twins + 1], order[twins]
    return partners


def _first_rounds(between: Edges, ranks: int) -> Ints:
    """[3]: the round in which each edge sends chunk 0: the first of its colour behind that of the edge above it."""
    colour = colours(between)
    first = np.zeros(len(colour), dtype=np.int64)
    for tree in (0, 1):
        waiting = np.nonzero(between.tree == tree)[0]
        received = np.full(ranks, -1)  # the round in which each rank receives chunk 0
        reached = np.arange(ranks) == 0
        while len(waiting):
            now = waiting[reached[between.upper[waiting]]]
            after = received[between.upper[now]] + 1
            first[now] = after + (after + colour[now]) % 2
            received[between.lower[now]] = first[now]
            waiting = waiting[~reached[between.upper[waiting]]]
            reached[between.lower[now]] = True
    return first


def _spread(ranks: int, chunks: int) -> Iterator[Messages]:
    """[3]: in round t the edges send whose first round is t, t - 2, t - 4, ... until all chunks of the tree are sent.

    With more chunks than the trees are high, the same two sets of edges come over and over; then the arrays are the
    same objects, so that their price need not be computed again.
    """
    if ranks == 1:
        return
    between = edges(ranks)
    first = _first_rounds(between, ranks)
    highest = int(first.max())
    on: dict[int, Edges] = {}
    sending: dict[int, Ints] = {}
    for t in range(highest + 2 * chunks - 1):
        if highest + 2 <= t < 2 * chunks:
            sending[t], on[t] = sending[t - 2], on[t - 2]
        else:
            since = t - first
            sending[t] = np.nonzero((since >= 0) & (since % 2 == 0) & (since < 2 * chunks))[0]
            on[t] = Edges(*(each[sending[t]] for each in between))
        block = on[t].tree * chunks + (t - first[sending[t]]) // 2
        yield send(on[t].upper, on[t].lower, block)


def _from(ranks: int, root: int, chunks: int) -> Iterator[Messages]:
    return with_root(_spread(ranks, chunks), ranks, root)


def _name(chunks: int) -> str:
    return f"double tree of {chunks}"
