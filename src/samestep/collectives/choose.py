"""Which algorithm for so many bytes on such links: every plan that fits is priced, and the cheapest is chosen.

    few bytes        latency counts: the fewest rounds                    recursive doubling, a tree
    many bytes       bandwidth counts: the fewest bytes                   halving and doubling, a ring
    several hosts    what crosses them counts, and how many messages do   hierarchical
    ports to spare   all of them used at once                             a torus in several directions

NCCL decides by such a model as well (`tuning.cc`), with constants of its makers; here they are measured on the links
in question (:mod:`samestep.collectives.measure`), and the answer says why. All candidates leave the same bits on all
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from samestep.collectives import double_tree, doubling, halving, hierarchical, ring, segmented, server, torus, tree
from samestep.collectives.plan import Operation, Plan, check_ranks
from samestep.errors import UsageError
from samestep.network.links import Link, Links
from samestep.network.pricing import Price, price_lines
from samestep.text import bytes_text, seconds_text


@dataclass(frozen=True)
class Candidate:
    """A plan and its price."""

    plan: Plan  # which rank sends what to which
    price: Price  # of the buffer in question
    rounds: int  # how many the plan has


@dataclass(frozen=True)
class Choice:
    """The cheapest plan, and all that it was compared with; `str` says why."""

    nbytes: float  # of the buffer
    links: Links  # among the ranks
    candidates: tuple[Candidate, ...]  # from the cheapest to the dearest

    @property
    def plan(self) -> Plan:
        """The cheapest."""
        return self.candidates[0].plan

    @property
    def seconds(self) -> float:
        """What it is predicted to take."""
        return self.candidates[0].price.seconds

    def __str__(self) -> str:
        plan = self.plan
        task = f"{plan.operation.replace('_', '-')} of {bytes_text(self.nbytes)} over {plan.ranks} ranks"
        answer = f"{task}: {plan.name}, {seconds_text(self.seconds)} predicted"
        return "\n".join([answer, f"links: {self.links}", "", *_table(self.candidates), "", _why(self.candidates)])


def choose(ranks: int, nbytes: float, links: Links, operation: Operation = "all_reduce", root: int = 0) -> Choice:
    """Returns the cheapest plan for a buffer of `nbytes`, and why.

    Args:
        ranks: in all; `links.local` of them on each host.
        nbytes: of the whole buffer; each rank's share of a reduce-scatter or all-gather is 1/ranks of it.
        links: measured, or supposed.
        operation: what to compute.
        root: of a broadcast or reduce.

    Raises:
        UsageError: fewer than 1 rank, fewer than 0 bytes, or an unknown operation.

    Example:
        >>> from samestep.network.links import Link
        >>> ethernet = Links(Link(latency_s=20e-6, bytes_per_s=1.25e9), adding_bytes_per_s=5e9)
        >>> [choose(8, nbytes, ethernet).plan.name for nbytes in (1e3, 1e6)]
        ['recursive doubling', 'halving and doubling']
    """
    check_ranks(ranks, root)
    if nbytes < 0:
        raise UsageError(f"a buffer of {nbytes} bytes: give 0 or more")
    if operation not in get_args(Operation):
        raise UsageError(f"there is no operation {operation!r}: choose one of {', '.join(get_args(Operation))}")
    found = [(plan, price_lines(plan, links)) for plan in possible_plans(operation, ranks, nbytes, links, root)]
    candidates = [Candidate(plan, lines.price(nbytes), lines.rounds) for plan, lines in found]
    # of those that are equal but for rounding, the first named wins: sorting is stable
    return Choice(nbytes, links, tuple(sorted(candidates, key=lambda one: float(f"{one.price.seconds:.9g}"))))


def all_reduces(ranks: int, local: int | None, chunks: Sequence[int], ports: int = 1) -> Iterator[Plan]:
    """Yields the all-reduces that fit, those whose bits do not depend on an element's place first.

    There is a double tree for each number of `chunks`; a rank can send `ports` messages side by side.
    """
    yield doubling.all_reduce(ranks)
    yield halving.all_reduce(ranks)
    yield tree.all_reduce(ranks)
    yield server.all_reduce(ranks, 1)
    yield ring.all_reduce(ranks)
    yield segmented.all_reduce(ranks, 2)
    yield from (double_tree.all_reduce(ranks, each) for each in chunks)
    if ranks > 1:
        yield server.all_reduce(ranks, ranks)
    rows, columns = _grid(ranks)
    if rows > 1:
        yield from (torus.all_reduce(rows, columns, parts) for parts in (1, 2, 4) if parts <= ports)
    if _even_hosts(ranks, local):
        for across in (ring.all_reduce, halving.all_reduce, doubling.all_reduce):
            yield hierarchical.all_reduce(ranks, local or ranks, across)


def possible_plans(operation: Operation, ranks: int, nbytes: float, links: Links, root: int = 0) -> Iterator[Plan]:
    """Yields the plans of an operation that fit."""
    chunks, segments = best_chunks(ranks, nbytes, links.across()), best_segments(ranks, nbytes, links.across())
    rows, columns = _grid(ranks)
    match operation:
        case "all_reduce":
            yield from all_reduces(ranks, links.local, [chunks], links.ports)
        case "reduce_scatter":
            yield halving.reduce_scatter(ranks)
            yield ring.reduce_scatter(ranks)
            yield segmented.reduce_scatter(ranks, 2)
            yield server.reduce_scatter(ranks)
            if rows > 1:
                yield torus.reduce_scatter(rows, columns)
        case "all_gather":
            yield halving.all_gather(ranks)
            yield ring.all_gather(ranks)
            yield server.all_gather(ranks)
            if rows > 1:
                yield torus.all_gather(rows, columns)
        case "broadcast":
            yield tree.broadcast(ranks, root)
            yield double_tree.broadcast(ranks, root, chunks)
            yield segmented.broadcast(ranks, root, segments)
            yield server.broadcast(ranks, root)
            if _even_hosts(ranks, links.local):
                yield hierarchical.broadcast(ranks, links.local or ranks, root)
        case "reduce":
            yield tree.reduce(ranks, root)
            yield segmented.reduce(ranks, root, segments)
            yield double_tree.reduce(ranks, root, chunks)
            yield server.reduce(ranks, root)


def _grid(ranks: int) -> tuple[int, int]:
    """The most nearly square grid of so many ranks; one row if there is no other."""
    rows = next(rows for rows in range(int(ranks**0.5), 0, -1) if ranks % rows == 0)
    return rows, ranks // rows


def _even_hosts(ranks: int, local: int | None) -> bool:
    """Whether there are several hosts with several ranks each, the same number on all."""
    return local is not None and 1 < local < ranks and ranks % local == 0


def best_chunks(ranks: int, nbytes: float, link: Link, most: int = 64) -> int:
    """Returns into how many chunks a tree each half of a double tree is best cut: sqrt((h-1) n beta / (2 alpha)).

    h is log2 of the ranks, rounded up.

    >>> best_chunks(8, 1e6, Link(20e-6, 1e9)), best_chunks(8, 100, Link(20e-6, 1e9))
    (7, 1)
    """
    height = (ranks - 1).bit_length()
    return _pieces((height - 1) * nbytes / link.bytes_per_s / 2, link.latency_s, most)


def best_segments(ranks: int, nbytes: float, link: Link, most: int = 64) -> int:
    """Returns into how many segments a chain's buffer is best cut: sqrt((p-2) n beta / alpha).

    >>> best_segments(8, 1e6, Link(20e-6, 1e9))
    17
    """
    return _pieces((ranks - 2) * nbytes / link.bytes_per_s, link.latency_s, most)


def _pieces(transfer: float, latency: float, most: int) -> int:
    if latency == 0:
        return most
    return min(most, max(1, round(math.sqrt(max(0.0, transfer / latency)))))


def _table(candidates: tuple[Candidate, ...]) -> Iterator[str]:
    width = max(len(one.plan.name) for one in candidates)
    head = ("total", "latency", "transfer", "adding", "rounds")
    yield " " * (width + 2) + "".join(f"{word:>10}" for word in head)
    for one in candidates:
        times = (one.price.seconds, one.price.latency_s, one.price.transfer_s, one.price.adding_s)
        cells = [*map(seconds_text, times), str(one.rounds)]
        yield f"  {one.plan.name:<{width}}" + "".join(f"{cell:>10}" for cell in cells)


def _why(candidates: tuple[Candidate, ...]) -> str:
    """One sentence on the winner and the next."""
    first, second = candidates[:2]
    if not second.price.seconds:
        return f"nothing has to be sent, so {first.plan.name} is as good as any"
    lead = 1 - first.price.seconds / second.price.seconds
    if lead < 0.005:
        return f"{first.plan.name} and {second.plan.name} cost the same"
    parts = []
    for word in ("latency", "transfer", "adding"):
        saved = getattr(second.price, f"{word}_s") - getattr(first.price, f"{word}_s")
        if abs(saved) >= 0.001 * second.price.seconds:
            parts.append(f"{seconds_text(abs(saved))} {'less' if saved > 0 else 'more'} {word}")
    rounds = f"{first.rounds} {'round' if first.rounds == 1 else 'rounds'}, not {second.rounds}"
    return f"{first.plan.name} beats {second.plan.name} by {100 * lead:.0f} %: {', '.join(parts)} ({rounds})"
