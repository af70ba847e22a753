"""A cluster as its file describes it: hosts and devices, the links between them, and the network.

The file is described in docs/plan.md, and the numbers of each kind of network in docs/topologies.md.

A message between hosts takes the latency of the file as long as it passes the fewest links there are, two from host to
switch and on to a host, one where hosts are wired to each other, and `hop` for every further one. Where there are
switches, links among them are as wide as a host's NICs together: what is not oversubscribed is so with any number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep import parsing
from samestep.errors import UsageError
from samestep.network import placement as placements
from samestep.network.links import Link, Links
from samestep.network.placement import Placement
from samestep.network.routing import ECMP, MINIMAL, Routing, valiant
from samestep.network.topologies.dragonfly import Dragonfly
from samestep.network.topologies.fat_tree import leaf_spine, of_ports
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.topology import LinkTypes, Switch, Topology
from samestep.network.topologies.torus import Torus
from samestep.parsing import BANDWIDTH, BYTES, TIME, one_of, positive, quantity, read, whole

_NUMBERS: dict[str, tuple[str, ...]] = {  # by kind of network, the keys of its own
    "switch": (),
    "ring": (),
    "torus": ("dims",),
    "fat-tree": ("hosts", "leaves", "ports", "oversubscription"),
    "dragonfly": ("p", "a", "h", "g"),
    "slim-fly": ("q", "p"),
}
_MOST_LINKS = 100_000_000  # a few arrays of one number for each fit, of 0.8 GB
_MOST = 10_000_000  # ranks: what is a few numbers for each still fits a machine's memory


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts with devices, and what is between them."""

    nodes: int  # hosts that may be used
    devices: int  # on each host; a rank for each
    links: Links  # as if all hosts were connected to one switch
    topology: Topology  # what they are connected to
    memory: float = math.inf  # bytes of a device
    speed: float = 1.0  # of a device, relative to the one that was profiled
    placement: str = "linear"  # "linear", "random", "snake" or "circuit"
    seed: int = 0  # of a placement that is random or searched for
    routing: Routing = MINIMAL  # of messages between hosts
    # all-reduces in the memory of one host: their latency, and bytes of all ranks together a second
    shared: Link | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices

    @property
    def is_flat(self) -> bool:
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

    def __str__(self) -> str:
        hosts = f"{self.nodes} hosts of {self.devices} devices" if self.nodes > 1 else f"{self.devices} devices"
        return f"{hosts}, {self.topology.name}; {self.links}" if self.nodes > 1 else f"{hosts}; {self.links}"


def load(path: str | Path) -> Cluster:
    """Returns the cluster of a file.

    Raises:
        UsageError: it is missing or not TOML; has a section or key that is unknown, or a value that cannot be.
    """
    return parse(parsing.read_text(path, f"`samestep bench links --write {path}` measures and writes one"), str(path))


def parse(text: str, source: str = "cluster.toml") -> Cluster:
    r"""Returns the cluster of a text.

    Example:
        >>> print(parse('[nodes]\ncount = 4\n[links]\nbetween = { latency = "5 us", bandwidth = "10 Gbit/s" }'))
        4 hosts of 1 devices, switch of 4 ports; 5 µs a message and 1.25 GB/s

    Raises:
        UsageError: as :func:`load`.
    """
    given = parsing.parse_toml(text, source)
    try:
        return _cluster(given)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except OverflowError:
        raise UsageError(f"{source}: one of its numbers is too large to compute with") from None


@dataclass(frozen=True, kw_only=True)
class _File:
    nodes: dict[str, Any] = field(metadata=read(parsing.table), default_factory=dict)
    links: dict[str, Any] = field(metadata=read(parsing.table), default_factory=dict)
    network: dict[str, Any] = field(metadata=read(parsing.table), default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Nodes:
    count: int = field(metadata=read(whole(1)), default=1)
    devices: int = field(metadata=read(whole(1)), default=1)
    memory: float = field(metadata=read(quantity(BYTES)), default=math.inf)
    speed: float = field(metadata=read(positive), default=1.0)


@dataclass(frozen=True, kw_only=True)
class _Link:
    latency: float = field(metadata=read(quantity(TIME)))
    bandwidth: float = field(metadata=read(quantity(BANDWIDTH)))


def _read_link(value: Any, name: str) -> Link:
    if not isinstance(value, dict):
        raise UsageError(f'{name} is {value!r:.40}: give {{ latency = "5 us", bandwidth = "10 Gbit/s" }}')
    link = parsing.load(_Link, value, name)
    return Link(link.latency, link.bandwidth)


@dataclass(frozen=True, kw_only=True)
class _Links:
    inside: Link | None = field(metadata=read(_read_link), default=None)
    between: Link | None = field(metadata=read(_read_link), default=None)
    shared: Link | None = field(metadata=read(_read_link), default=None)
    adding: float = field(metadata=read(quantity(BANDWIDTH)), default=math.inf)
    nics: int = field(metadata=read(whole(1)), default=1)
    crowded: float = field(metadata=read(positive), default=1)

    def links(self, count: int, devices: int) -> Links:
        """Between hosts and inside them; with one device on each host, the one kind there is."""
        if count > 1 and self.between is None:
            raise UsageError(f"there are {count} hosts and no links.between: give its latency and bandwidth")
        if devices > 1 and self.inside is None:
            raise UsageError(
                f"there are {devices} devices on a host and no links.inside: give its latency and bandwidth"
            )
        inside = self.inside or self.between or Link(0.0, math.inf)
        both = count > 1 and devices > 1
        return Links(
            inside if devices > 1 or self.between is None else self.between,
            self.between if both else None,
            devices if both else None,
            adding_bytes_per_s=self.adding,
            nics=self.nics,
            crowded=self.crowded,
        )


def _read_dims(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise UsageError(f"{name} is {value!r:.40}: give the hosts in each dimension, such as [16, 16]")
    return tuple(value)


def _read_oversubscription(value: Any, name: str) -> int:
    text = str(value).removesuffix(":1")
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise UsageError(f'{name} is {value!r:.40}: give a whole number such as 2, or "2:1"')
    return int(text)


@dataclass(frozen=True, kw_only=True)
class _Network:
    kind: str = field(metadata=read(one_of(_NUMBERS)), default="switch")
    hop: float = field(metadata=read(quantity(TIME)), default=0.0)
    placement: str = field(metadata=read(one_of(["linear", "random", "snake", "circuit"])), default="linear")
    routing: str = field(metadata=read(one_of(["minimal", "ecmp", "valiant"])), default="minimal")
    seed: int = field(metadata=read(whole(0)), default=0)
    parts: int | None = field(metadata=read(whole(1)), default=None)
    dims: tuple[int, ...] | None = field(metadata=read(_read_dims), default=None)
    hosts: int | None = field(metadata=read(whole(1)), default=None)
    leaves: int | None = field(metadata=read(whole(1)), default=None)
    ports: int | None = field(metadata=read(whole(2)), default=None)
    oversubscription: int | None = field(metadata=read(_read_oversubscription), default=None)
    p: int | None = field(metadata=read(whole(1)), default=None)
    a: int | None = field(metadata=read(whole(1)), default=None)
    h: int | None = field(metadata=read(whole(1)), default=None)
    g: int | None = field(metadata=read(whole(1)), default=None)
    q: int | None = field(metadata=read(whole(1)), default=None)

    def topology(self, count: int, devices: int, links: Links) -> Topology:
        """The network, of `count` hosts that are used: a switch or ring has no more."""
        for name in (name for names in _NUMBERS.values() for name in names):
            if getattr(self, name) is not None and name not in _NUMBERS[self.kind]:
                kinds = " or ".join(kind for kind, names in _NUMBERS.items() if name in names)
                raise UsageError(f"network.{name} is of a {kinds}, and kind is {self.kind}: leave it out")
        link_types = self._link_types(devices, links)
        match self.kind:
            case "ring":
                return Torus(link_types, (count,))
            case "torus":
                return Torus(link_types, self._needed("dims"))
            case "fat-tree":
                return self._fat_tree(link_types, count)
            case "dragonfly":
                p, a, h = map(self._needed, ("p", "a", "h"))
                return Dragonfly(link_types, p, a, h, self.g or 0)
            case "slim-fly":
                return SlimFly(link_types, self._needed("q"), self.p or 0)
            case _:
                return Switch(link_types, count)

    def route(self) -> Routing:
        if self.parts is not None and self.routing != "valiant":
            raise UsageError(f"network.parts is of valiant routing, and routing is {self.routing}: leave it out")
        if self.routing == "valiant":
            return valiant(self.seed, self.parts or 1)
        return ECMP if self.routing == "ecmp" else MINIMAL

    def _link_types(self, devices: int, links: Links) -> LinkTypes:
        """All alike, as wide as a host's NICs together; between hosts that are routers, as one."""
        across, fewest = links.across(), 1 if self.kind in ("ring", "torus") else 2
        if fewest * self.hop > across.latency_s:
            raise UsageError(
                f"network.hop is {self.hop} s, and a message passes {fewest} links at least in {across.latency_s} s: "
                "give less"
            )
        return LinkTypes(
            Link(self.hop, across.bytes_per_s * (1 if fewest == 1 else links.nics)),
            intra_host=links.inside,
            ranks_per_host=devices,
            overhead_s=across.latency_s - fewest * self.hop,
        )

    def _needed(self, name: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise UsageError(f"a {self.kind} needs network.{name}")
        return value

    def _fat_tree(self, link_types: LinkTypes, count: int) -> Topology:
        """Of leaves and spines, with `hosts` on a leaf; or of three levels of switches with so many `ports`."""
        over = self.oversubscription or 1
        if self.ports is not None:
            for name in ("hosts", "leaves"):
                if getattr(self, name) is not None:
                    raise UsageError(f"network.ports and network.{name} are both given: leave one of them out")
            return of_ports(link_types, self.ports, over)
        if self.hosts is None:
            raise UsageError("a fat-tree needs network.hosts, how many are on a leaf, or network.ports of its switches")
        if self.hosts % over:
            raise UsageError(
                f"{self.hosts} hosts on a leaf are not oversubscribed {over}:1: give a divisor of {self.hosts}"
            )
        return leaf_spine(link_types, self.leaves or -(-count // self.hosts), self.hosts, self.hosts // over)


def _cluster(given: dict[str, Any]) -> Cluster:
    file = parsing.load(_File, given, "", "the file")
    nodes = parsing.load(_Nodes, file.nodes, "nodes", "[nodes]")
    between = parsing.load(_Links, file.links, "links", "[links]")
    network = parsing.load(_Network, file.network, "network", "[network]")
    count, devices = nodes.count, nodes.devices
    if count * devices > _MOST:
        raise UsageError(f"{count} hosts of {devices} devices are {count * devices} ranks: give {_MOST} at most")
    links = between.links(count, devices)
    topology = network.topology(count, devices, links)
    if topology.links > _MOST_LINKS:
        raise UsageError(f"{topology.name} has {topology.links} links: give {_MOST_LINKS} at most")
    if count > topology.hosts:
        raise UsageError(
            f"nodes.count is {count}, and {topology.name} holds {topology.hosts} hosts: give fewer, or a larger network"
        )
    return Cluster(
        nodes=count,
        devices=devices,
        links=links,
        topology=topology,
        memory=nodes.memory,
        speed=nodes.speed,
        placement=network.placement,
        seed=network.seed,
        routing=network.route(),
        shared=between.shared,
    )
