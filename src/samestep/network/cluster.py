"""A cluster as a file says it: what stands where, what lies between, and what the network looks like.

    [nodes]
    count = 16                   # hosts
    devices = 8                  # on each; a rank for each
    memory = "80 GB"             # of a device
    speed = 2.5                  # of a device, relative to the one that was profiled

    [links]
    inside = { latency = "2 us", bandwidth = "300 GB/s" }      # from rank to rank on one host
    between = { latency = "5 us", bandwidth = "100 Gbit/s" }   # from rank to rank on two, all the way
    shared = { latency = "90 us", bandwidth = "9 GB/s" }       # all-reduces in memory, of all ranks' bytes together
    adding = "50 GB/s"
    nics = 1

    [network]
    kind = "fat-tree"            # switch (the default), ring, torus, fat-tree, dragonfly, slim-fly
    hosts = 8                    # on a leaf, and so on: each kind has numbers of its own
    hop = "0.3 us"               # of the latency, what each link on the way takes
    placement = "linear"         # random, snake, circuit
    routing = "minimal"          # ecmp, valiant

A message between hosts takes the latency that the file says as long as it passes the fewest links there are, two from
host to switch and on to a host, one where hosts are wired to each other, and `hop` for every further one. Where there
are switches, links among them are as wide as a host's NICs together: what is not oversubscribed is so with any number.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.network import placement as placements
from samestep.network.links import Link, Links
from samestep.network.placement import Placement
from samestep.network.routing import ECMP, MINIMAL, Routing, valiant
from samestep.network.topologies.cables import Cables
from samestep.network.topologies.dragonfly import Dragonfly
from samestep.network.topologies.fat_tree import FatTree, leaf_spine, of_ports
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.switch import Switch
from samestep.network.topologies.topology import Topology
from samestep.network.topologies.torus import Torus
from samestep.network.units import read_bandwidth, read_bytes, read_seconds

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts with devices, and what is between them.

    Attributes:
        nodes: hosts that may be used.
        devices: on each host; a rank for each.
        links: as if all hosts stood at one switch.
        topology: what they stand at.
        memory: bytes of a device.
        speed: of a device, relative to the one that was profiled.
        placement: "linear", "random", "snake" or "circuit".
        seed: of a placement that is random or searched for.
        routing: of messages between hosts.
        shared: all-reduces in the memory of one host: their latency, and bytes of all ranks together a second.
        text: that it was read from.
    """

    nodes: int
    devices: int
    links: Links
    topology: Topology
    memory: float = math.inf
    speed: float = 1.0
    placement: str = "linear"
    seed: int = 0
    routing: Routing = MINIMAL
    shared: Link | None = None
    text: str = field(default="", repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """How many there can be."""
        return self.nodes * self.devices

    @property
    def is_flat(self) -> bool:
        """Whether one switch is all the network."""
        return isinstance(self.topology, Switch)

    def place(self, ranks: int) -> Placement:
        """Returns which rank runs on which host.

        Raises:
            UsageError: more ranks than there are devices.
        """
        if not 1 <= ranks <= self.ranks:
            raise UsageError(
                f"{ranks} ranks do not fit {self.nodes} hosts of {self.devices} devices: give 1 to {self.ranks}"
            )
        if self.placement == "linear":
            return placements.linear(self.topology, ranks)
        along = placements.random if self.placement == "random" else placements.circuit
        return along(self.topology, ranks, self.seed)

    def dumps(self) -> str:
        r"""Returns a file that says the same; numbers are rounded to 12 digits.

        Raises:
            UsageError: no file can say it, such as a fat tree of four levels.

        Example:
            >>> one = parse('nodes.count = 4\nlinks.between = { latency = "5 us", bandwidth = "10 Gbit/s" }')
            >>> print(one.dumps())
            [nodes]
            count = 4
            devices = 1
            [links]
            between = { latency = "5 us", bandwidth = "1.25 GB/s" }
        """
        text = "\n".join(_lines(self))
        if parse(text) != self:
            raise UsageError(f"a file cannot say what this cluster is ({self}): keep the code that makes it")
        return text

    def __str__(self) -> str:
        hosts = f"{self.nodes} hosts of {self.devices} devices" if self.nodes > 1 else f"{self.devices} devices"
        return f"{hosts}, {self.topology.name}; {self.links}" if self.nodes > 1 else f"{hosts}; {self.links}"


def load(path: str | Path) -> Cluster:
    """Returns the cluster of a file.

    Raises:
        UsageError: it is missing or no TOML; has a section or key that is unknown, or a value that cannot be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file: `samestep bench links --write {path}` measures and writes one"
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder: give the cluster's file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, source: str = "cluster.toml") -> Cluster:
    r"""Returns the cluster of a text.

    Example:
        >>> print(parse('[nodes]\ncount = 4\n[links]\nbetween = { latency = "5 us", bandwidth = "10 Gbit/s" }'))
        4 hosts of 1 devices, switch of 4 ports; 5 µs a message and 1.25 GB/s

    Raises:
        UsageError: as :func:`load`.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is no TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None
    try:
        return _cluster(given, text)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _cluster(given: Mapping[str, Any], text: str) -> Cluster:
    _check_keys(given, ("nodes", "links", "network"), "the file")
    nodes = _section(given, "nodes", ("count", "devices", "memory", "speed"))
    links = _section(given, "links", ("inside", "between", "shared", "adding", "nics"))
    network = _section(given, "network", ("kind", "hop", "placement", "routing", "seed", "parts", *_NUMBERS))
    count, devices = _whole(nodes, "nodes.count", 1), _whole(nodes, "nodes.devices", 1)
    if count * devices > _MOST:
        raise UsageError(f"{count} hosts of {devices} devices are {count * devices} ranks: give {_MOST} at most")
    ways = _links(links, count, devices)
    topology = _topology(network, count, devices, ways)
    if count > topology.hosts:
        raise UsageError(
            f"nodes.count is {count}, and {topology.name} holds {topology.hosts} hosts: give fewer, or a larger network"
        )
    return Cluster(
        nodes=count,
        devices=devices,
        links=ways,
        topology=topology,
        memory=read_bytes(nodes["memory"], "nodes.memory") if "memory" in nodes else math.inf,
        speed=_positive(nodes.get("speed", 1.0), "nodes.speed"),
        placement=_one_of(network.get("placement", "linear"), ("linear", "random", "snake", "circuit"), "placement"),
        seed=_whole(network, "network.seed", 0),
        routing=_routing(network),
        shared=_link(links["shared"], "links.shared") if "shared" in links else None,
        text=text,
    )


def _links(given: Mapping[str, Any], count: int, devices: int) -> Links:
    inside, between = (_link(given[name], f"links.{name}") if name in given else None for name in ("inside", "between"))
    if count > 1 and between is None:
        raise UsageError(f"there are {count} hosts and no links.between: give its latency and bandwidth")
    if devices > 1 and inside is None:
        raise UsageError(f"there are {devices} devices on a host and no links.inside: give its latency and bandwidth")
    one = inside or between or Link(0.0, math.inf)
    return Links(
        one if devices > 1 or between is None else between,
        between if count > 1 and devices > 1 else None,
        devices if count > 1 and devices > 1 else None,
        adding_bytes_per_s=read_bandwidth(given["adding"], "links.adding") if "adding" in given else math.inf,
        nics=_whole(given, "links.nics", 1),
    )


def _link(given: Any, where: str) -> Link:
    if not isinstance(given, dict):
        raise UsageError(f'{where} is {given!r}: give {{ latency = "5 us", bandwidth = "10 Gbit/s" }}')
    _check_keys(given, ("latency", "bandwidth"), where)
    for key in ("latency", "bandwidth"):
        if key not in given:
            raise UsageError(f"{where} lacks its {key}")
    return Link(
        read_seconds(given["latency"], f"{where}.latency"), read_bandwidth(given["bandwidth"], f"{where}.bandwidth")
    )


_MOST = 10_000_000  # ranks: what is a few numbers for each still fits a machine's memory

_NUMBERS = {
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


def _topology(given: Mapping[str, Any], count: int, devices: int, links: Links) -> Topology:
    kind = _one_of(given.get("kind", "switch"), tuple(_OF_KIND), "kind")
    for key in given:
        if key in _NUMBERS and key not in _OF_KIND[kind]:
            raise UsageError(f"network.{key} is of a {_NUMBERS[key]}, and kind is {kind}: leave it out")
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
    wide = Link(hop, across.bytes_per_s * links.nics)
    return Cables(
        wide if fewest == 2 else Link(hop, across.bytes_per_s),
        port=wide,
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
        return of_ports(cables, _whole(given, "network.ports", 2), over)
    hosts = _whole(given, "network.hosts", 1) if "hosts" in given else 0
    if not hosts:
        raise UsageError("a fat-tree needs network.hosts, how many stand on a leaf, or network.ports of its switches")
    if hosts % over:
        raise UsageError(f"{hosts} hosts on a leaf are not oversubscribed {over}:1: give a divisor of {hosts}")
    leaves = _whole(given, "network.leaves", 1) if "leaves" in given else -(-count // hosts)
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
    return {name: _whole(given, f"network.{name}", 1) for name in (*needed, *more) if name in given}


def _routing(given: Mapping[str, Any]) -> Routing:
    name = _one_of(given.get("routing", "minimal"), ("minimal", "ecmp", "valiant"), "routing")
    if "parts" in given and name != "valiant":
        raise UsageError(f"network.parts is of valiant routing, and routing is {name}: leave it out")
    if name == "valiant":
        return valiant(_whole(given, "network.seed", 0), _whole(given, "network.parts", 1))
    return ECMP if name == "ecmp" else MINIMAL


def _section(given: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    section = given.get(name, {})
    if not isinstance(section, dict):
        raise UsageError(f"{name} is {section!r}: write it as a section, [{name}]")
    _check_keys(section, keys, f"[{name}]")
    return section


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"{key} in {where} is unknown: {hint}")


def _whole(given: Mapping[str, Any], name: str, least: int) -> int:
    value = given.get(name.rpartition(".")[2], least)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}: give a whole number, {least} or more")
    return value


def _positive(value: Any, name: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}: give a number above 0")
    return float(value)


def _one_of(value: Any, known: tuple[str, ...], name: str) -> str:
    if value not in known:
        close = get_close_matches(str(value), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise UsageError(f"network.{name} is {value!r}: {hint}")
    return str(value)


def _lines(cluster: Cluster) -> Iterator[str]:
    yield from ("[nodes]", f"count = {cluster.nodes}", f"devices = {cluster.devices}")
    if cluster.memory < math.inf:
        yield f'memory = "{cluster.memory:.12g} B"'
    if cluster.speed != 1.0:
        yield f"speed = {cluster.speed!r}"
    links = cluster.links
    named = {"inside": links.inside, "between": links.between, "shared": cluster.shared}
    if cluster.nodes > 1 and cluster.devices == 1:
        named |= {"inside": None, "between": links.inside}
    yield "[links]"
    for name, link in named.items():
        if link is not None and link.bytes_per_s < math.inf:
            latency, bandwidth = f"{link.latency_s * 1e6:.12g} us", f"{link.bytes_per_s / 1e9:.12g} GB/s"
            yield f'{name} = {{ latency = "{latency}", bandwidth = "{bandwidth}" }}'
    if links.adding_bytes_per_s < math.inf:
        yield f'adding = "{links.adding_bytes_per_s / 1e9:.12g} GB/s"'
    if links.nics > 1:
        yield f"nics = {links.nics}"
    yield from _network_lines(cluster)


def _network_lines(cluster: Cluster) -> Iterator[str]:
    hop, routing = cluster.topology.cables.between.latency_s, cluster.routing
    numbers = {
        **_kind_of(cluster.topology),
        **({"hop": f'"{hop * 1e6:.12g} us"'} if hop else {}),
        **({"placement": f'"{cluster.placement}"'} if cluster.placement != "linear" else {}),
        **({"routing": f'"{routing.name}"'} if routing != MINIMAL else {}),
        **({"seed": cluster.seed} if cluster.seed else {}),
        **({"parts": routing.parts} if routing.parts > 1 else {}),
    }
    if numbers:
        yield "[network]"
        yield from (f"{name} = {value}" for name, value in numbers.items())


def _kind_of(topology: Topology) -> dict[str, Any]:
    """What the file calls it; a single switch is called nothing."""
    if isinstance(topology, Torus):
        return {"kind": '"torus"', "dims": list(topology.dims)}
    if isinstance(topology, Dragonfly):
        return {"kind": '"dragonfly"', "p": topology.p, "a": topology.a, "h": topology.h, "g": topology.groups}
    if isinstance(topology, SlimFly):
        return {"kind": '"slim-fly"', "q": topology.q, "p": topology.concentration}
    if isinstance(topology, FatTree):
        over = topology.down[0] // topology.up[0] if topology.up else 1
        named = {"hosts": topology.down[0], "leaves": topology.down[-1]} if len(topology.down) == 2 else None
        return {"kind": '"fat-tree"', **(named or {"ports": topology.down[-1]}), "oversubscription": over}
    return {}
