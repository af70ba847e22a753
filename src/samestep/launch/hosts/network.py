"""This host's network interfaces, the route to another host, and whether it can be reached.

gloo and NCCL choose an interface by the host's name, often a wrong one, and then wait. Here each host opens a port that
answers a nonce; a host that reads this nonce has reached it, and no other service.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UsageError

SIOCGIFCONF, SIOCGIFFLAGS = 0x8912, 0x8913  # netdevice(7)
IFREQ = 16 + 2 * struct.calcsize("L") + 8  # bytes: a name, and a union whose largest member is struct ifmap
IFF_UP = 1
REASONS = {
    errno.ECONNREFUSED: "refuses: a firewall, or nothing listens there",
    errno.EHOSTUNREACH: "there is no route to it",
    errno.ENETUNREACH: "its network cannot be reached",
    errno.EINVAL: "this host's own routes drop what goes there",  # a blackhole route
    errno.EACCES: "this host's own routes forbid it",
    errno.EPERM: "this host's own firewall forbids it",
}


@dataclass(frozen=True)
class Interface:
    """One IPv4 address of a network interface that is up; an interface may have several."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def addresses() -> list[Interface]:
    """Returns the interfaces of this host that can be used, once for each address, the loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        for request in _listed(ask):
            with contextlib.suppress(OSError):  # it has gone in this moment
                (flags,) = struct.unpack_from("H", fcntl.ioctl(ask, SIOCGIFFLAGS, request), 16)
                name = request[:16].rstrip(b"\0").decode()
                if flags & IFF_UP:
                    found.append(Interface(name, socket.inet_ntoa(request[20:24])))
    return sorted(found, key=lambda interface: interface.is_loopback)


def _listed(through: socket.socket) -> list[bytes]:
    """Returns a struct ifreq for each address; asking interface by interface would list the first of each only."""
    room = array.array("B", bytes(IFREQ * 64))
    while True:
        place, size = room.buffer_info()
        (used,) = struct.unpack_from("i", fcntl.ioctl(through, SIOCGIFCONF, struct.pack("iP", size, place)))
        if used < size:  # full, it may have been cut
            return [room[start : start + IFREQ].tobytes() for start in range(0, used, IFREQ)]
        room = array.array("B", bytes(2 * size))


def route_to(address: str) -> Interface | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        try:
            ask.connect((address, 9))  # nothing is sent
        except OSError:
            return None
        source = ask.getsockname()[0]
    return next((interface for interface in addresses() if interface.address == source), None)


def interface_named(name: str) -> Interface:
    """Returns one of this host's interfaces, or raises UsageError."""
    found = addresses()
    for interface in found:
        if interface.name == name:
            return interface
    there = ", ".join(f"{interface.name} ({interface.address})" for interface in found)
    raise UsageError(f"there is no network interface {name} on {socket.gethostname()}; there are {there}")


class ProbeServer:
    """A port that sends its nonce; watch :meth:`fileno`, then :meth:`serve_ready`."""

    def __init__(self, address: str = "0.0.0.0") -> None:  # noqa: S104  (others are to try it)
        self._socket = socket.create_server((address, 0), backlog=1024)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.nonce = secrets.token_hex(16)

    def fileno(self) -> int:
        return self._socket.fileno()

    def serve_ready(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._socket.accept()
                with visitor, contextlib.suppress(OSError):
                    visitor.sendall(self.nonce.encode())

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class ProbeTarget:
    address: str
    port: int
    nonce: str


@dataclass
class _Probe:
    name: str
    nonce: str
    stream: socket.socket
    received: bytes = b""

    def receive(self) -> str | None:
        try:
            data = self.stream.recv(64)
        except BlockingIOError:
            return None
        except OSError as error:
            return _reason(error.errno or 0)
        self.received += data
        if data and len(self.received) < len(self.nonce):
            return None
        return "" if self.received == self.nonce.encode() else "somebody else answers there"


def probe(
    targets: Mapping[str, ProbeTarget], seconds: float, meanwhile: ProbeServer | None = None
) -> dict[str, str | None]:
    """Tries all probe servers at once; returns for each why it could not be reached, or None where it was.

    `seconds` is for all of them together; `meanwhile` is this host's own server, answered at the same time.
    """
    reached: dict[str, str | None] = {}
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as streams, selectors.DefaultSelector() as selector:
        for name, target in targets.items():
            stream = streams.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            stream.setblocking(False)
            code = stream.connect_ex((target.address, target.port))
            if code not in {0, errno.EINPROGRESS}:
                reached[name] = _reason(code)
            else:
                selector.register(stream, selectors.EVENT_READ, _Probe(name, target.nonce, stream))
        if meanwhile is not None:
            selector.register(meanwhile.fileno(), selectors.EVENT_READ, None)
        while len(reached) < len(targets) and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data is None and meanwhile is not None:
                    meanwhile.serve_ready()
                elif (fault := key.data.receive()) is not None:
                    selector.unregister(key.fileobj)
                    reached[key.data.name] = fault or None
    return {name: reached.get(name, f"no answer in {seconds:.0f} s") for name in targets}


def _reason(code: int) -> str:
    return REASONS.get(code, os.strerror(code).lower())
