"""Names, interfaces, ports and routes of this host: what ranks need to find each other.

gloo and torchrun look up the host's own name. On many machines it does not resolve, or resolves to 127.0.1.1; then the
ranks of other hosts connect to themselves: the commonest way in which a first run over two hosts fails.

The ways that packets take, and what is dropped on purpose:

    /proc/net/route      eth0  00000000  010200C0  0003 … 00000000      a default route by 192.0.2.1: proc_net(5)
                         *     0000100A  00000000  0001 … 0000FFFF      10.16.0.0/16 is dropped; 0201: refused
"""

from __future__ import annotations

import errno
import shlex
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from ipaddress import IPv4Network
from pathlib import Path
from typing import NamedTuple

from samestep.doctor.finding import Finding, as_root, hosts_entry, ok
from samestep.launch.hosts.network import Interface, addresses
from samestep.rankenv import variable

TORCHRUNS_PORT = 29500
LONG = 1.0  # seconds to look up a name
CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # variables that name an interface
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ADAPTERS = Path("/sys/class/infiniband")
NET = Path("/sys/class/net")
WIDER = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
FEWEST = 1000  # ports
TABLE = Path("/proc/net/route")
NOWHERE = "*"
UP, REJECTED = 0x0001, 0x0200  # RTF_UP, RTF_REJECT of <linux/route.h>
MOST = 6  # that are shown


def check() -> Iterator[Finding]:
    found = addresses()
    yield own_name(socket.gethostname(), found)
    yield from localhost()
    yield interfaces(found)
    yield from loopback()
    yield from ports()
    yield from chosen(found)
    yield from adapters(ADAPTERS)
    yield from judge_routes(read_routes(TABLE.read_text(encoding="ascii", errors="replace")))


def own_name(name: str, found: Sequence[Interface]) -> Finding:
    outer = next((interface.address for interface in found if not interface.is_loopback), None)
    entry = f"{outer or '127.0.0.1'} {name}"
    fix = hosts_entry(entry, first=True)
    begun = time.monotonic()
    try:
        led = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)})
    except OSError as error:
        effect = "torchrun on several hosts looks it up and fails, or waits; samestep run does not use it"
        fix = hosts_entry(entry, first=False)
        return Finding("own name", "warning", f"{name} does not resolve: {error}", effect, fix)
    took = time.monotonic() - begun
    text = f"{name} is {', '.join(map(str, led))}"
    known = {interface.address for interface in found}
    if outer is not None and all(str(address).startswith("127.") for address in led):
        effect = "torchrun's ranks on other hosts that are told it connect to themselves; samestep run does not use it"
        fix = f"ip -4 -brief address  # give torchrun on other hosts {outer} instead of the name"
        return Finding("own name", "note", text, effect, fix)
    if not any(str(address) in known or str(address).startswith("127.") for address in led):
        effect = "ranks on other hosts that are told it reach somebody else"
        return Finding("own name", "warning", f"{text}, which is not this host", effect, fix)
    if took > LONG:
        text = f"{text}, found after {took:.1f} s"
        return Finding("own name", "warning", text, "every start of a rank waits as long", fix)
    return ok("own name", text)


def localhost() -> Iterator[Finding]:
    """Yields whether the name that scripts give as MASTER_ADDR leads to this host."""
    try:
        led = {entry[4][0] for entry in socket.getaddrinfo("localhost", None, socket.AF_INET, socket.SOCK_STREAM)}
    except OSError as error:
        said = f"does not resolve: {error}"
    else:
        if all(str(address).startswith("127.") for address in led):
            return
        said = f"is {', '.join(sorted(map(str, led)))}"
    effect = "scripts with MASTER_ADDR=localhost do not start"
    yield Finding("localhost", "warning", said, effect, hosts_entry("127.0.0.1 localhost", first=True))


def interfaces(found: Sequence[Interface], net: Path = NET) -> Finding:
    text = ", ".join(f"{interface.name} {interface.address}{_link(net / interface.name)}" for interface in found)
    if all(interface.is_loopback for interface in found):
        effect = "runs over several hosts are not possible"
        down = sorted(name for _, name in socket.if_nameindex() if name != "lo")
        up = f"ip link set {shlex.quote(down[0])} up  # then: ip addr add ADDRESS" if down else ""
        return Finding("interfaces", "note", text or "none", effect, as_root(up) if up else "ip -br link")
    return ok("interfaces", text)


def _link(folder: Path) -> str:
    parts = []
    for name, word in (("speed", "{} Mbit/s"), ("mtu", "MTU {}")):
        with suppress(OSError, ValueError):
            value = int((folder / name).read_text(encoding="ascii"))
            parts += [word.format(value)] if value > 0 else []
    return f" ({', '.join(parts)})" if parts else ""


def loopback() -> Iterator[Finding]:
    """Sees whether two processes of this host could talk."""
    try:
        with (
            closing(socket.create_server(("127.0.0.1", 0))) as server,
            closing(socket.create_connection(server.getsockname(), timeout=2)),
        ):
            yield ok("loopback", "answers")
    except OSError as error:
        if error.errno in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}:
            first, last = port_range()
            text, fix = f"all of {first} to {last} are taken", as_root(WIDER) + "  # who has them: ss -tan"
            yield Finding("ports", "error", text, "no rank finds a port to be reached at", fix)
            return
        text, fix = f"127.0.0.1 does not answer: {error}", as_root("ip link set lo up")
        yield Finding("loopback", "error", text, "ranks of one host do not find each other", fix)


def port_range() -> tuple[int, int]:
    """Returns the first and the last of the ports that the kernel gives to who asks for any."""
    try:
        first, last = map(int, RANGE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return 32768, 60999
    return first, last


def ports(named: int = TORCHRUNS_PORT) -> Iterator[Finding]:
    """Yields whether there are ports, and whether the one is free that scripts like to name."""
    first, last = port_range()
    if last - first < FEWEST:
        text = f"{last - first + 1} to choose from, {first} to {last}"
        yield Finding("ports", "warning", text, "many ranks on one host find no port", as_root(WIDER))
    try:
        with closing(socket.create_server(("0.0.0.0", named))):  # noqa: S104  (closed at once)
            yield ok("ports", f"{first} to {last}; {named} is free")
    except OSError:
        effect = "torchrun, and scripts with a fixed MASTER_PORT, fail: 'address already in use'"
        fix = f"ss -ltnp 'sport = :{named}'  # who has it; samestep run takes a free one, torchrun with --master-port"
        yield Finding("ports", "note", f"{named} is taken", effect, fix)


def chosen(found: Sequence[Interface]) -> Iterator[Finding]:
    there = sorted({interface.name for interface in found})
    for name in CHOSEN:
        value = variable(name)
        if not value or value.startswith("^"):
            continue
        wanted = [word.removeprefix("=").partition(":")[0] for word in value.split(",")]
        prefixes = name.startswith("NCCL") and not value.startswith("=")  # NCCL takes beginnings of names
        if not any(one == word or (prefixes and one.startswith(word)) for one in there for word in wanted):
            effect = "ranks find no network: the process group fails to form"
            yield Finding(name, "error", f"is {value}; here are {', '.join(there)}", effect, f"unset {name}")


def adapters(folder: Path) -> Iterator[Finding]:
    for port in sorted(folder.glob("*/ports/*")):
        state, rate = ((port / name).read_text(encoding="ascii").strip() for name in ("state", "rate"))
        check, text = f"InfiniBand {port.parts[-3]}", f"port {port.name}: {state}, {rate}"
        if "ACTIVE" in state:
            yield ok(check, text)
        else:
            effect = "NCCL and MPI use the ports that are left, or TCP"
            yield Finding(check, "warning", text, effect, "ibstat  # then see to the cable, and the subnet manager")


class Route(NamedTuple):
    interface: str
    network: IPv4Network
    gateway: str
    flags: int
    metric: int

    @property
    def is_default(self) -> bool:
        return self.network.prefixlen == 0

    @property
    def is_dropped(self) -> bool:
        return self.interface == NOWHERE or bool(self.flags & REJECTED)

    def __str__(self) -> str:
        by = f" by {self.gateway}" if self.gateway != "0.0.0.0" else ""  # noqa: S104  (the kernel's word for none)
        return f"{'default' if self.is_default else self.network}{by} on {self.interface}"


def read_routes(text: str) -> list[Route]:
    r"""Reads the kernel's table.

    >>> [str(one) for one in read_routes("Iface …\neth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n")]
    ['192.0.2.0/24 on eth0']
    """
    rows = (line.split() for line in text.splitlines()[1:])
    routes = []
    for interface, to, gateway, flags, _, _, metric, mask, *_ in (row for row in rows if len(row) >= 8):
        network = IPv4Network(f"{_address(to)}/{_address(mask)}", strict=False)
        routes.append(Route(interface, network, _address(gateway), int(flags, 16), int(metric)))
    return routes


def _address(word: str) -> str:
    """The kernel prints a number of the machine's own byte order, which is in memory as in a packet."""
    return socket.inet_ntoa(struct.pack("=I", int(word, 16)))


def judge_routes(routes: list[Route]) -> Iterator[Finding]:
    """Yields the ways there are, those that are dropped, and defaults of which chance takes one."""
    used = [one for one in routes if one.flags & UP and not one.is_dropped]
    if used:
        more = f", {len(used) - MOST} more" if len(used) > MOST else ""
        yield ok("routes", ", ".join(map(str, used[:MOST])) + more)
    for one in routes:
        if one.is_dropped:
            effect = "hosts there are not reached: 'network is unreachable', or silence"
            fix = as_root(f"ip route del {'default' if one.is_default else one.network}")
            yield Finding("routes", "warning", f"what goes to {one.network} is dropped here", effect, fix)
    yield from _defaults([one for one in used if one.is_default], used)


def _defaults(defaults: list[Route], used: list[Route]) -> Iterator[Finding]:
    outer = [one.interface for one in used if one.interface != "lo"]
    if not defaults and outer:
        effect = "hosts outside these networks are not reached; those inside are"
        fix = as_root(f"ip route add default dev {outer[0]}") + "  # or via GATEWAY"
        yield Finding("routes", "note", "there is no default route", effect, fix)
    least = min((one.metric for one in defaults), default=0)
    first = [one for one in defaults if one.metric == least]
    if len({one.interface for one in first}) > 1:
        text = f"{len(first)} default routes are as good as each other: {', '.join(map(str, first))}"
        effect = "which network carries the training is chance: samestep run --interface NAME decides"
        fix = as_root(f"ip route del default dev {first[-1].interface}")
        yield Finding("routes", "warning", text, effect, fix)
