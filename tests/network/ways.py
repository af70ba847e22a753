"""The ways of single messages, link by link: what the loads of many are compared with."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from samestep.network.topologies.topology import Hop


def hops(topology, routing, sources, targets):
    """Yields the hops of messages between hosts, ports included, those of one message in their order."""
    everyone, whole = np.arange(len(sources)), np.ones(len(sources))
    if not topology.hosts_are_routers:
        yield Hop(everyone, sources, whole)
    for segments in routing.segments(topology, sources, targets):
        for hop in topology.hops(segments, split=routing.split):
            yield Hop(hop.messages, hop.links + topology.first_router_link, hop.shares / routing.parts)
    if not topology.hosts_are_routers:
        yield Hop(everyone, topology.hosts + targets, whole)


def flow(topology, routing, source, target):
    """How much of a message passes on each link, in the order of the way."""
    shares = defaultdict(float)
    if source != target:
        for hop in hops(topology, routing, np.array([source]), np.array([target])):
            for link, share in zip(hop.links.tolist(), hop.shares.tolist(), strict=True):
                shares[link] += share
    return {link: share for link, share in shares.items() if share}


def path(topology, routing, source, target):
    """The vertices on the way of a message that is not split."""
    walked = hops(topology, routing, np.array([source]), np.array([target])) if source != target else ()
    links = [link for hop in walked for link in hop.links.tolist()]
    return [source, *(topology.ends(link)[1] for link in links)]
