"""The price of a plan, rank by rank and message by message: the plain oracle of :mod:`samestep.network.pricing`.

Exact where links and bytes are fractions.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from samestep.network.pricing import Price


def price(plan, nbytes, links):
    """Returns what a plan costs."""
    block = nbytes / plan.blocks
    total = Price()
    added = {}
    for messages in plan.rounds:
        moving = _moving(messages, block, links)
        total += _slowest(moving, _exposed(added, messages), added, block / links.adding_bytes_per_s)
        added = _adding(messages)
    return total + _slowest({}, set(added), added, block / links.adding_bytes_per_s)


def conflict(spans, begin, end):
    """Whether any of the spans has a block of [begin, end)."""
    return any(begin < stop and start < end for start, stop in spans)


def _adding(messages):
    """What each rank adds in a round."""
    spans = defaultdict(list)
    for message in messages:
        if message.adds:
            spans[message.target].append((message.begin, message.end))
    return spans


def _exposed(added, messages):
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


def _slowest(moving, exposed, added, gamma):
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

    def __init__(self):
        self.latency: float = 0
        self.transfer: float = 0
        self.largest = Price()

    def take(self, link, nbytes):
        one = Price(link.latency_s, nbytes / link.bytes_per_s)
        self.latency += one.latency_s
        self.transfer += one.transfer_s
        if one.seconds > self.largest.seconds:
            self.largest = one

    def by_rank(self, ports):
        """One message after another, over `ports` ports; the largest is never cut."""
        if ports == 1:
            return Price(self.latency, self.transfer)
        spread = Price(self.latency / ports, self.transfer / ports)
        return max(spread, self.largest, key=lambda each: each.seconds)

    def by_host(self, nics):
        """Ranks prepare their messages side by side, so one latency; the bytes share the NICs."""
        return Price(self.largest.latency_s, self.transfer / nics)


def _host(links, rank):
    return 0 if links.local is None else rank // links.local


def _moving(messages, block, links):
    """How long each rank sends and receives in a round, and waits for its host's NICs to do so."""
    far = Counter()  # messages that cross, by rank and direction
    for one in messages:
        if links.between is None or _host(links, one.source) != _host(links, one.target):
            far.update([(one.source, "out"), (one.target, "in")])
    ranks, hosts, crossing = defaultdict(_Port), defaultdict(_Port), {}
    left = {rank: links.crowded if min(far[rank, "out"], far[rank, "in"]) > 1 else 1 for rank, _ in far}
    for message in messages:
        nbytes = block * (message.end - message.begin)
        source, target = _host(links, message.source), _host(links, message.target)
        link = links.inside if source == target else links.across()
        for rank, host, way in ((message.source, source, "out"), (message.target, target, "in")):
            crosses = links.between is None or source != target
            ranks[rank, way].take(link, nbytes / left[rank] if crosses else nbytes)
            if source != target:
                hosts[host, way].take(link, nbytes)
                crossing[rank, way] = (host, way)
    slowest = {}
    for (rank, way), port in ranks.items():
        passing = [port.by_rank(links.ports)]
        if (rank, way) in crossing:
            shared = hosts[crossing[rank, way]].by_host(links.nics)
            passing.append(Price(shared.latency_s, shared.transfer_s / left[rank]))
        slowest[rank] = max(slowest.get(rank, Price()), *passing, key=lambda each: each.seconds)
    return slowest
