"""Every message of a few ranks followed in time: what :mod:`samestep.network.pricing` is compared with.

    rank 0    ├─ sends, receives ─┤├─ next round ─┤             a rank waits for those alone with whom it has messages,
    rank 1    ├─ sends, receives ──────────┤├─ next round       to send or to receive
                  └ latency ┴ bytes, at a rate that changes whenever any message begins or ends

Messages share links max-min fairly: all rates grow together, until a link is full; those that pass it keep their rate,
and the others go on growing [1]. A message that is split takes of each link its share of the rate.

A message may have to be expected (`expected`), as gloo's are: half of its latency goes by until the sender hears that
the target is there, and the other half until the first byte is. Where the target has been waiting the first half is
over, and the sender is done when the last byte has left, half a latency before it arrives:

    both enter at once     ├─ I expect it ─▶├─ bytes ─▶ │                  alpha + beta n
    it waits for long      ├─ bytes ─▶ │                                   alpha / 2 + beta n

Assumed: otherwise a message leaves as soon as its sender is there, and nobody has to be ready to take it; routes are
fixed; what TCP needs to find its rate takes no time. Adding (gamma) takes place on the hosts and is not in here.

Source: D. Bertsekas and R. Gallager, "Data Networks", 2nd ed. 1992, section 6.5.2 [1]. SimGrid (H. Casanova et al.,
JPDC 74, 2014) does the same with shares by latency.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
from ways import hops

from samestep.network.routing import MINIMAL

SAME = 1e-9  # of what is left: messages that end within it end together
TINY = 1e-12  # seconds of latency, where there is none


def play(rounds, topology, placement, routing=MINIMAL, *, by_latency=False, expected=False):
    """Returns after how many seconds the last message of all rounds has arrived.

    Args:
        rounds: of messages between ranks: (source, target, bytes).
        topology: with what its links cost.
        placement: of the ranks on its hosts.
        routing: of the messages.
        by_latency: a message of twice the latency has half the share of a full link, as TCP's have.
        expected: a message leaves once its sender has heard that its target is there.
    """
    return _Play(list(rounds), _Ways(topology, placement, routing), by_latency, expected).run()


def messages_of(plan, nbytes):
    """The rounds of a plan for a buffer of so many bytes, for `play`."""
    block = nbytes / plan.blocks
    return [[(one.source, one.target, block * (one.end - one.begin)) for one in some] for some in plan.rounds]


@dataclass(eq=False)
class _Message:
    """A message on its way.

    Attributes:
        source: the rank that it comes from.
        target: the rank that it goes to.
        number: of its round.
        left: bytes.
        way: links, and the shares of its rate that they carry.
        latency: seconds before the first byte.
        sender_at: when its sender came to its round.
        target_at: likewise, its target.
        has_left: its last byte is under way.
    """

    source: int
    target: int
    number: int
    left: float
    way: tuple
    latency: float
    sender_at: float | None = None
    target_at: float | None = None
    has_left: bool = False


class _Ways:
    """The ways of messages, and what links carry; inside a host each rank has a link out, and one in."""

    def __init__(self, topology, placement, routing) -> None:
        self._topology, self._placement, self._routing = topology, placement, routing
        inside = np.full(2 * placement.ranks, topology.link_types.inside.bytes_per_s)
        self.bandwidths = np.concatenate([topology.bandwidths, inside])
        self._found: dict[tuple[int, int], tuple[tuple, float]] = {}

    def of(self, source: int, target: int) -> tuple[tuple, float]:
        """Returns links with shares, and the latency, from a rank to another."""
        key = source, target
        if key not in self._found:
            hosts = self._placement.hosts
            self._found[key] = (
                self._inside(source, target)
                if hosts[source] == hosts[target]
                else self._across(hosts[source], hosts[target])
            )
        return self._found[key]

    def _inside(self, source: int, target: int) -> tuple[tuple, float]:
        first = self._topology.links
        links = np.array([first + 2 * source, first + 2 * target + 1])
        return (links, np.ones(2)), self._topology.link_types.inside.latency_s

    def _across(self, source: int, target: int) -> tuple[tuple, float]:
        shares: dict[int, float] = defaultdict(float)
        for hop in hops(self._topology, self._routing, np.array([source]), np.array([target])):
            for link, share in zip(hop.links.tolist(), hop.shares.tolist(), strict=True):
                shares[link] += share
        links, parts = np.array(list(shares)), np.array(list(shares.values()))
        latency = self._topology.link_types.overhead_s + float((self._topology.latencies[links] * parts).sum())
        return (links, parts), latency


@dataclass(eq=False)
class _Play:
    """What happens when.

    Attributes:
        rounds: of messages.
        ways: that they take.
        now: seconds.
        expected: they leave once their targets are there.
        sending: by rank, the messages of each round that it sends.
        taking: likewise, those that it receives.
        open: by rank and round, messages that it has yet to send or receive.
        line: by rank, the rounds that it has yet to end.
        waiting: (when, a number, message): its first byte begins to move, or its last one, which has left, arrives.
        moving: messages whose bytes are on their way.
        by_latency: their shares are.
    """

    rounds: list
    ways: _Ways
    by_latency: bool = False
    expected: bool = False
    now: float = 0.0
    sending: dict[tuple[int, int], list[_Message]] = field(default_factory=lambda: defaultdict(list))
    taking: dict[tuple[int, int], list[_Message]] = field(default_factory=lambda: defaultdict(list))
    open: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    line: dict[int, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    waiting: list[tuple[float, int, _Message]] = field(default_factory=list)
    moving: list[_Message] = field(default_factory=list)
    _begun: int = 0

    def run(self) -> float:
        """Returns the end of the last message."""
        self._deal()
        for rank in list(self.line):
            self._enter(rank)
        while self.waiting or self.moving:
            self._go_on()
        return self.now

    def _deal(self) -> None:
        for number, each in enumerate(self.rounds):
            for source, target, nbytes in each:
                way, latency = self.ways.of(source, target)
                message = _Message(source, target, number, float(nbytes), way, latency)
                self.sending[source, number].append(message)
                self.taking[target, number].append(message)
                for rank in (source, target):
                    self.open[rank, number] += 1
                    if not self.line[rank] or self.line[rank][-1] != number:
                        self.line[rank].append(number)

    def _enter(self, rank: int) -> None:
        """Begins what a rank sends in its next round; it may have received all of that round already."""
        while self.line[rank]:
            number = self.line[rank][0]
            for message in self.sending.pop((rank, number), ()):
                message.sender_at = self.now
                self._begin(message)
            for message in self.taking.pop((rank, number), ()):
                message.target_at = self.now
                if self.expected:
                    self._begin(message)
            if self.open[rank, number]:
                return
            self.line[rank].popleft()

    def _begin(self, message: _Message) -> None:
        """Lets a message move when its first byte does, if that is known."""
        if message.sender_at is None:
            return
        if not self.expected:
            self._at(message.sender_at + message.latency, message)
        elif message.target_at is not None:
            self._at(max(message.sender_at, message.target_at + message.latency / 2), message)

    def _at(self, moment: float, message: _Message) -> None:
        self._begun += 1
        heapq.heappush(self.waiting, (moment, self._begun, message))

    def _go_on(self) -> None:
        """Goes to the next moment at which a message begins to move, or ends."""
        rates = self._rates()
        ends = [message.left / rate for message, rate in zip(self.moving, rates, strict=True)]
        soonest = min(ends, default=float("inf"))
        until = min(soonest, self.waiting[0][0] - self.now if self.waiting else float("inf"))
        done = []
        for message, rate, end in zip(list(self.moving), rates, ends, strict=True):
            message.left -= rate * until
            if end <= until * (1 + SAME):
                done.append(message)
        self.now += until
        self.moving = [message for message in self.moving if message not in done]
        while self.waiting and self.waiting[0][0] <= self.now * (1 + SAME):
            message = heapq.heappop(self.waiting)[2]
            (self.moving if message.left > 0 and not message.has_left else done).append(message)
        for message in done:
            self._end(message)

    def _end(self, message: _Message) -> None:
        if not self.expected:
            self._over(message, message.source, message.target)
        elif message.has_left:
            self._over(message, message.target)
        else:
            message.has_left = True
            self._at(self.now + message.latency / 2, message)
            self._over(message, message.source)

    def _over(self, message: _Message, *ranks: int) -> None:
        for rank in ranks:
            self.open[rank, message.number] -= 1
            self._enter(rank)

    def _rates(self) -> list[float]:
        """[1] The max-min fair rates of what is moving: all grow at their pace until a link on their way is full."""
        if not self.moving:
            return []
        used, places = np.unique(np.concatenate([message.way[0] for message in self.moving]), return_inverse=True)
        owners = np.repeat(np.arange(len(self.moving)), [len(message.way[0]) for message in self.moving])
        shares = np.concatenate([message.way[1] for message in self.moving])
        room = self.ways.bandwidths[used].copy()
        rates = np.zeros(len(self.moving))
        pace = np.array([1 / max(message.latency, TINY) if self.by_latency else 1.0 for message in self.moving])
        growing = np.ones(len(self.moving), dtype=bool)
        while growing.any():
            weights = np.bincount(places, shares * (growing * pace)[owners], len(used))
            times = np.divide(room, weights, out=np.full(len(used), np.inf), where=weights > 0)
            least = times.min()
            rates[growing] += least * pace[growing]
            room -= least * weights
            full = times <= least * (1 + SAME)
            growing[owners[full[places] & growing[owners]]] = False
        return [float(rate) for rate in rates]
