"""The networks that a cluster's file can say, by their kind: read from its section, and written as one.

kind           numbers of its own                              hosts
switch                                                         nodes.count
ring                                                           nodes.count
torus          dims = [16, 16]                                 their product
fat-tree       hosts on a leaf, leaves, oversubscription       hosts x leaves; as many leaves as are needed
               or ports of three levels' switches              k^3/4 where nothing is oversubscribed
dragonfly      p, a, h, g                                      p a g, g = a h + 1 unless given
slim-fly       q, p                                            2 q^2 p
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from samestep.errors import UsageError
from samestep.network.links import Link, Links
from samestep.network.reading import read_name, read_whole
from samestep.network.topologies.cables import Cables
from samestep.network.topologies.dragonfly import Dragonfly
from samestep.network.topologies.fat_tree import FatTree, leaf_spine, of_ports
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.switch import Switch
from samestep.network.topologies.topology import Topology
from samestep.network.topologies.torus import Torus
from samestep.network.units import read_seconds

__all__: list[str] = []

NUMBERS = {
    "dims": "torus",
    "hosts": "fat-tree",
    "leaves": "fat-tree",
    "ports": "fat-tree",
    "oversubscription": "fat-tree",
    "p": "dragonfly or slim-fly",
    "a": "dragonfly",
    "h": "dragonfly",
    "g": "dragonfly",
    "q": "slim-fly",
}
_OF_KIND: dict[str, tuple[str, ...]] = {
    "switch": (),
    "ring": (),
    "torus": ("dims",),
    "fat-tree": ("hosts", "leaves", "ports", "oversubscription"),
    "dragonfly": ("p", "a", "h", "g"),
    "slim-fly": ("q", "p"),
}


def topology(given: Mapping[str, Any], count: int, devices: int, links: Links) -> Topology:
    """Returns the network of a section.

    Args:
        given: the section.
        count: hosts that are used: a switch or ring has no more.
        devices: on each.
        links: as if all hosts stood at one switch.

    Raises:
        UsageError: an unknown kind, numbers of another, or such as make none.
    """
    kind = read_name(given.get("kind", "switch"), tuple(_OF_KIND), "network.kind")
    for key in given:
        if key in NUMBERS and key not in _OF_KIND[kind]:
            raise UsageError(f"network.{key} is of a {NUMBERS[key]}, and kind is {kind}: leave it out")
    cables = _cables(given, kind, devices, links)
    makers: dict[str, Callable[[], Topology]] = {
        "switch": lambda: Switch(cables, count),
        "ring": lambda: Torus(cables, (count,)),
        "torus": lambda: Torus(cables, _dims(given)),
        "fat-tree": lambda: _fat_tree(given, count, cables),
        "dragonfly": lambda: Dragonfly(cables, **_numbers(given, ("p", "a", "h"), ("g",))),
        "slim-fly": lambda: SlimFly(cables, **_numbers(given, ("q",), ("p",))),
    }
    return makers[kind]()


def _cables(given: Mapping[str, Any], kind: str, devices: int, links: Links) -> Cables:
    """The kinds of link: all alike, as wide as a host's NICs together; between hosts that are routers, as one."""
    across, fewest = links.across(), 1 if kind in ("ring", "torus") else 2
    hop = read_seconds(given.get("hop", 0.0), "network.hop")
    if fewest * hop > across.latency_s:
        raise UsageError(
            f"network.hop is {hop} s, and a message passes {fewest} links at least in {across.latency_s} s: give less"
        )
    return Cables(
        Link(hop, across.bytes_per_s * (1 if fewest == 1 else links.nics)),
        inside=links.inside,
        local=devices,
        overhead_s=across.latency_s - fewest * hop,
    )


def _dims(given: Mapping[str, Any]) -> tuple[int, ...]:
    dims = given.get("dims")
    if not isinstance(dims, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in dims):
        raise UsageError(f"network.dims is {dims!r}: give the hosts in each dimension, such as [16, 16]")
    return tuple(dims)


def _fat_tree(given: Mapping[str, Any], count: int, cables: Cables) -> Topology:
    """Of leaves and spines, with `hosts` on a leaf; or of three levels of switches with so many `ports`."""
    over = _oversubscription(given.get("oversubscription", 1))
    if "ports" in given:
        for key in ("hosts", "leaves"):
            if key in given:
                raise UsageError(f"network.ports and network.{key} are both given: leave one of them out")
        return of_ports(cables, read_whole(given, "network.ports", 2), over)
    hosts = read_whole(given, "network.hosts", 1) if "hosts" in given else 0
    if not hosts:
        raise UsageError("a fat-tree needs network.hosts, how many stand on a leaf, or network.ports of its switches")
    if hosts % over:
        raise UsageError(f"{hosts} hosts on a leaf are not oversubscribed {over}:1: give a divisor of {hosts}")
    leaves = read_whole(given, "network.leaves", 1) if "leaves" in given else -(-count // hosts)
    return leaf_spine(cables, leaves, hosts, hosts // over)


def _oversubscription(given: Any) -> int:
    text = str(given).removesuffix(":1")
    if isinstance(given, bool) or not text.isdecimal() or int(text) < 1:
        raise UsageError(f'network.oversubscription is {given!r}: give a whole number such as 2, or "2:1"')
    return int(text)


def _numbers(given: Mapping[str, Any], needed: tuple[str, ...], more: tuple[str, ...]) -> dict[str, int]:
    missing = [name for name in needed if name not in given]
    if missing:
        raise UsageError(f"a {given['kind']} needs network.{missing[0]}")
    return {name: read_whole(given, f"network.{name}", 1) for name in (*needed, *more) if name in given}


def said(topology: Topology) -> dict[str, Any]:
    """Returns the section that says a network: nothing for a single switch.

    >>> from samestep.network.topologies.torus import ring
    >>> said(ring(Cables(Link(1e-6, 25e9)), 4))
    {'kind': '"torus"', 'dims': [4]}
    """
    if isinstance(topology, Torus):
        return {"kind": '"torus"', "dims": list(topology.dims)}
    if isinstance(topology, Dragonfly):
        return {"kind": '"dragonfly"', "p": topology.p, "a": topology.a, "h": topology.h, **_some(g=topology.g)}
    if isinstance(topology, SlimFly):
        return {"kind": '"slim-fly"', "q": topology.q, **_some(p=topology.p)}
    if isinstance(topology, FatTree):
        over = topology.down[0] // topology.up[0] if topology.up else 1
        named = {"hosts": topology.down[0], "leaves": topology.down[-1]} if len(topology.down) == 2 else None
        return {"kind": '"fat-tree"', **(named or {"ports": topology.down[-1]}), "oversubscription": over}
    return {}


def _some(**numbers: int) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if number}
