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
    crowded = 0.8                # of that bandwidth, where every host exchanges with several at once

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.network import kinds
from samestep.network import placement as placements
from samestep.network.links import Link, Links
from samestep.network.placement import Placement
from samestep.network.reading import check_keys, read_name, read_positive, read_whole, section
from samestep.network.routing import ECMP, MINIMAL, Routing, valiant
from samestep.network.topologies.switch import Switch
from samestep.network.topologies.topology import Topology
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
        raise UsageError(f"{source} is not valid TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None
    except (RecursionError, ValueError):  # Python's own limits: of lists in lists, and of digits
        raise UsageError(f"{source}: its numbers are too long, or its lists too deep") from None
    try:
        return _cluster(given, text)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except OverflowError:
        raise UsageError(f"{source}: one of its numbers is too large to compute with") from None


def _cluster(given: Mapping[str, Any], text: str) -> Cluster:
    check_keys(given, ("nodes", "links", "network"), "the file")
    nodes = section(given, "nodes", ("count", "devices", "memory", "speed"))
    links = section(given, "links", ("inside", "between", "shared", "adding", "nics", "crowded"))
    network = section(given, "network", ("kind", "hop", "placement", "routing", "seed", "parts", *kinds.NUMBERS))
    count, devices = read_whole(nodes, "nodes.count", 1), read_whole(nodes, "nodes.devices", 1)
    if count * devices > _MOST:
        raise UsageError(f"{count} hosts of {devices} devices are {count * devices} ranks: give {_MOST} at most")
    ways = _links(links, count, devices)
    topology = kinds.topology(network, count, devices, ways)
    if topology.links > _MOST_LINKS:
        raise UsageError(f"{topology.name} has {topology.links} links: give {_MOST_LINKS} at most")
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
        speed=read_positive(nodes.get("speed", 1.0), "nodes.speed"),
        placement=read_name(network.get("placement", "linear"), _PLACEMENTS, "network.placement"),
        seed=read_whole(network, "network.seed", 0),
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
        nics=read_whole(given, "links.nics", 1),
        crowded=read_positive(given.get("crowded", 1.0), "links.crowded"),
    )


def _link(given: Any, where: str) -> Link:
    if not isinstance(given, dict):
        raise UsageError(f'{where} is {given!r}: give {{ latency = "5 us", bandwidth = "10 Gbit/s" }}')
    check_keys(given, ("latency", "bandwidth"), where)
    for key in ("latency", "bandwidth"):
        if key not in given:
            raise UsageError(f"{where} lacks its {key}")
    return Link(
        read_seconds(given["latency"], f"{where}.latency"), read_bandwidth(given["bandwidth"], f"{where}.bandwidth")
    )


_PLACEMENTS = ("linear", "random", "snake", "circuit")
_MOST_LINKS = 100_000_000  # a few arrays of one number for each fit, of 0.8 GB
_MOST = 10_000_000  # ranks: what is a few numbers for each still fits a machine's memory


def _routing(given: Mapping[str, Any]) -> Routing:
    name = read_name(given.get("routing", "minimal"), ("minimal", "ecmp", "valiant"), "network.routing")
    if "parts" in given and name != "valiant":
        raise UsageError(f"network.parts is of valiant routing, and routing is {name}: leave it out")
    if name == "valiant":
        return valiant(read_whole(given, "network.seed", 0), read_whole(given, "network.parts", 1))
    return ECMP if name == "ecmp" else MINIMAL


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
    if links.crowded < 1:
        yield f"crowded = {links.crowded!r}"
    yield from _network_lines(cluster)


def _network_lines(cluster: Cluster) -> Iterator[str]:
    hop, routing = cluster.topology.cables.between.latency_s, cluster.routing
    numbers = {
        **kinds.said(cluster.topology),
        **({"hop": f'"{hop * 1e6:.12g} us"'} if hop else {}),
        **({"placement": f'"{cluster.placement}"'} if cluster.placement != "linear" else {}),
        **({"routing": f'"{routing.name}"'} if routing != MINIMAL else {}),
        **({"seed": cluster.seed} if cluster.seed else {}),
        **({"parts": routing.parts} if routing.parts > 1 else {}),
    }
    if numbers:
        yield "[network]"
        yield from (f"{name} = {value}" for name, value in numbers.items())
