"""A cable between two hosts that is long and narrow: a process takes their packets, and hands them over later.

    node1 ── cable 10.99.0.1 ──▶ bytes / rate, one after another ── latency ──▶ 10.99.0.2 cable ── node2
                             ◀── the same the other way ─────────────────────◀──

The kernel can do the same (tc netem) where it is built in, which it is not everywhere. Packets may be large here, so
that few have to be carried.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = ("10.99.0.1", "10.99.0.2")
MTU = 15000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


@contextlib.contextmanager
def long_cable(lab, bytes_per_s: float, latency_s: float) -> Iterator[None]:
    """Joins the first two hosts of a lab, which meet at ADDRESSES[0]."""
    spaces = [lab.namespace(name) for name in lab.names[:2]]
    words = [sys.executable, str(Path(__file__)), *spaces, str(bytes_per_s), str(latency_s)]
    carrier = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert carrier.stdout is not None
        assert carrier.stdout.readline() == "ready\n"
        for space, own, other in zip(spaces, ADDRESSES, reversed(ADDRESSES), strict=True):
            for command in (f"addr add {own} peer {other} dev cable", f"link set cable mtu {MTU} up"):
                subprocess.run(["ip", "-n", space, *command.split()], check=True)
        yield
    finally:
        carrier.kill()
        carrier.communicate()


def end_in(space: str) -> int:
    """Returns the descriptor of a network interface that is made in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", space).open() as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", b"cable", _IFF_TUN | _IFF_NO_PI))
    return descriptor


def carry(ends: list[int], bytes_per_s: float, latency_s: float) -> None:
    """Hands packets over, each way by itself, until the process is ended."""
    free = dict.fromkeys(ends, 0.0)  # when the last packet of that end has left
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                os.write(target, packet)
        left = max(0.0, waiting[0][0] - now) if waiting else None
        for source in select.select(ends, [], [], left)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(source, 65536)
                    number += 1
                    free[source] = max(free[source], time.monotonic()) + len(packet) / bytes_per_s
                    target = ends[1 - ends.index(source)]
                    heapq.heappush(waiting, (free[source] + latency_s, number, target, packet))


if __name__ == "__main__":
    joined = [end_in(space) for space in sys.argv[1:3]]
    print("ready", flush=True)
    carry(joined, float(sys.argv[3]), float(sys.argv[4]))
