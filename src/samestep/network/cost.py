"""The price of a plan: what its rounds cost on given links.

    round k of one rank     ├─ adding what it must send on ─┤├── the slower of its sending and its receiving ──┤
                                                             ├─ adding what nobody waits for ─┤
    round k                 lasts as long as that of its slowest rank

A rank has one port (or `ports`): its messages leave one after another, alpha + beta n each, while others come in at
the same time (full duplex). What the ranks of a host send to other hosts shares its NICs, and so does what they
receive. A rank that sends to several hosts and hears from several in one round has `links.crowded` of the bandwidth.
What a rank received and adds is added while the next round travels, unless that round sends it on: this is
how :mod:`samestep.collectives.engine` does it, and what segments are for.

Bytes are cut into equal blocks, a fraction of a byte where they do not divide. On real elements a block is longer by
less than one element, so a plan costs at most rounds x element size x beta more than its price.

A plan is taken as it stands: anything with these three attributes, such as a `samestep.collectives.plan.Plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from samestep.network.links import Link, Links

__all__: list[str] = []


class Message(Protocol):
    """Blocks [begin, end) from `source` to `target`, which adds them to its own or puts them in their place."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def adds(self) -> bool: ...


class Rounds(Protocol):
    """Rounds of messages over a buffer of `blocks` equal blocks."""

    @property
    def blocks(self) -> int: ...
    @property
    def rounds(self) -> Sequence[Sequence[Message]]: ...


@dataclass(frozen=True)
class Price:
    """Seconds, and what they go into.

    Attributes:
        latency_s: alpha of the messages.
        transfer_s: beta of their bytes.
        adding_s: gamma of what is added while nothing travels.
    """

    latency_s: float = 0
    transfer_s: float = 0
    adding_s: float = 0

    @property
    def seconds(self) -> float:
        """The whole."""
        return self.latency_s + self.transfer_s + self.adding_s

    def __add__(self, other: Price) -> Price:
        return Price(
            self.latency_s + other.latency_s, self.transfer_s + other.transfer_s, self.adding_s + other.adding_s
        )


Spans = list[tuple[int, int]]


def price(plan: Rounds, nbytes: float, links: Links) -> Price:
    """Returns what a plan costs.

    Args:
        plan: the rounds.
        nbytes: of the whole buffer.
        links: among the ranks.

    Example:
        >>> from samestep.collectives import ring
        >>> from samestep.network.links import Link
        >>> price(ring.all_reduce(4), 8e6, Links(Link(20e-6, 1e9), adding_bytes_per_s=4e9))
        Price(latency_s=0.00012, transfer_s=0.012, adding_s=0.0015)
    """
    block = nbytes / plan.blocks
    total = Price()
    added: dict[int, Spans] = {}
    for messages in plan.rounds:
        moving = _moving(messages, block, links)
        total += _slowest(moving, _exposed(added, messages), added, block / links.adding_bytes_per_s)
        added = _adding(messages)
    return total + _slowest({}, set(added), added, block / links.adding_bytes_per_s)


def conflict(spans: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """Returns whether any of the spans has a block of [begin, end).

    >>> conflict([(0, 2), (5, 6)], 2, 5), conflict([(0, 2), (5, 6)], 1, 3)
    (False, True)
    """
    return any(begin < stop and start < end for start, stop in spans)


def _adding(messages: Sequence[Message]) -> dict[int, Spans]:
    """What each rank adds in a round."""
    spans: dict[int, Spans] = defaultdict(list)
    for message in messages:
        if message.adds:
            spans[message.target].append((message.begin, message.end))
    return spans


def _exposed(added: dict[int, Spans], messages: Sequence[Message]) -> set[int]:
    """The ranks that must have added before this round: they send a block on, or have it replaced."""
    waiting = set()
    for message in messages:
        rank = message.source
        if rank in added and rank not in waiting and conflict(added[rank], message.begin, message.end):
            waiting.add(rank)
        rank = message.target
        if not message.adds and rank in added and conflict(added[rank], message.begin, message.end):
            waiting.add(rank)
    return waiting


def _slowest(moving: dict[int, Price], exposed: set[int], added: dict[int, Spans], gamma: float) -> Price:
    """The round of the rank that needs longest, from what it added before to what it has sent and received."""
    worst = Price()
    for rank in moving.keys() | added.keys():
        transfer = moving.get(rank, Price())
        adding = gamma * sum(end - begin for begin, end in added.get(rank, ()))
        if rank not in exposed:
            adding = max(0, adding - transfer.seconds)
        mine = Price(transfer.latency_s, transfer.transfer_s, adding)
        if mine.seconds > worst.seconds:
            worst = mine
    return worst


class _Port:
    """What passes through one port of a rank, or through the NICs of a host, in one round."""

    def __init__(self) -> None:
        self.latency: float = 0
        self.transfer: float = 0
        self.largest = Price()

    def take(self, link: Link, nbytes: float) -> None:
        one = Price(link.latency_s, nbytes / link.bytes_per_s)
        self.latency += one.latency_s
        self.transfer += one.transfer_s
        if one.seconds > self.largest.seconds:
            self.largest = one

    def by_rank(self, ports: int) -> Price:
        """One message after another, over `ports` ports; the largest is never cut."""
        if ports == 1:
            return Price(self.latency, self.transfer)
        spread = Price(self.latency / ports, self.transfer / ports)
        return max(spread, self.largest, key=lambda each: each.seconds)

    def by_host(self, nics: int) -> Price:
        """Ranks prepare their messages side by side, so one latency; the bytes share the NICs."""
        return Price(self.largest.latency_s, self.transfer / nics)


def _moving(messages: Sequence[Message], block: float, links: Links) -> dict[int, Price]:
    """How long each rank sends and receives in a round, and waits for its host's NICs to do so."""
    ranks: dict[tuple[int, str], _Port] = defaultdict(_Port)
    hosts: dict[tuple[int, str], _Port] = defaultdict(_Port)
    abroad: dict[tuple[int, str], int] = defaultdict(int)  # messages that cross
    crossing: dict[tuple[int, str], tuple[int, str]] = {}
    for message in messages:
        nbytes = block * (message.end - message.begin)
        source, target = links.host(message.source), links.host(message.target)
        link = links.inside if source == target else links.across()
        for rank, host, way in ((message.source, source, "out"), (message.target, target, "in")):
            ranks[rank, way].take(link, nbytes)
            abroad[rank, way] += source != target or links.between is None
            if source != target:
                hosts[host, way].take(link, nbytes)
                crossing[rank, way] = (host, way)
    slowest: dict[int, Price] = {}
    for (rank, way), port in ranks.items():
        passing = [port.by_rank(links.ports)]
        if (rank, way) in crossing:
            passing.append(hosts[crossing[rank, way]].by_host(links.nics))
        left = links.crowded if min(abroad[rank, "out"], abroad[rank, "in"]) > 1 else 1
        passing = [Price(each.latency_s, each.transfer_s / left) for each in passing]
        slowest[rank] = max(slowest.get(rank, Price()), *passing, key=lambda each: each.seconds)
    return slowest
