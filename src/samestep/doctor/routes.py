"""The ways that packets take from this host: by which interface, and what is dropped on purpose.

    /proc/net/route      eth0  00000000  010200C0  0003 … 00000000      a default route by 192.0.2.1: proc_net(5)
                         *     0000100A  00000000  0001 … 0000FFFF      10.16.0.0/16 is dropped; 0201: refused

Ranks of other hosts are reached by these. Whether they are is tried with `samestep doctor --hosts`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import NamedTuple

from samestep.doctor.fixes import as_root
from samestep.doctor.line import Finding, ok

__all__: list[str] = []

TABLE = Path("/proc/net/route")
NOWHERE = "*"
UP, REJECTED = 0x0001, 0x0200  # RTF_UP, RTF_REJECT of <linux/route.h>
MOST = 6  # that are shown


class Route(NamedTuple):
    """Where packets to a network go."""

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


def look() -> Iterator[Finding]:
    """Yields where packets go."""
    yield from judge(read(TABLE.read_text(encoding="ascii", errors="replace")))


def read(text: str) -> list[Route]:
    r"""Reads the kernel's table.

    >>> [str(one) for one in read("Iface …\neth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n")]
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


def judge(routes: list[Route]) -> Iterator[Finding]:
    """Yields the ways there are, those that lead nowhere, and defaults of which chance takes one."""
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
