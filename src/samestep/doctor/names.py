"""Names, interfaces and ports of this host: what ranks need to find each other.

gloo and torchrun look up the host's own name. On many machines it leads nowhere, or to 127.0.1.1, and then the ranks of
other hosts connect to themselves: the commonest way in which a first run over two hosts fails.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from samestep.doctor.line import Line, fine
from samestep.launch.network import Interface, addresses
from samestep.rankenv import variable

__all__: list[str] = []

TORCHRUNS_PORT = 29500
LONG = 1.0  # seconds to look up a name
CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # variables that name an interface
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ADAPTERS = Path("/sys/class/infiniband")
FEWEST = 1000  # ports


def look() -> Iterator[Line]:
    """Yields a line for each."""
    found = addresses()
    yield own_name(socket.gethostname(), found)
    yield _interfaces(found)
    yield loopback()
    yield from ports()
    yield from chosen(found)
    yield from adapters(ADAPTERS)


def own_name(name: str, found: Sequence[Interface]) -> Line:
    """Judges where the host's own name leads."""
    outer = next((interface.address for interface in found if not interface.is_loopback), None)
    entry = f"echo '{outer or '127.0.0.1'} {name}'"
    mend = f"{{ {entry}; cat /etc/hosts; }} > /tmp/hosts && cp /tmp/hosts /etc/hosts"  # its first line counts
    begun = time.monotonic()
    try:
        led = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)})
    except OSError as error:
        effect = "torchrun, gloo and NCCL on several hosts fail, or wait: they look it up"
        return Line("own name", "warning", f"{name} leads nowhere: {error}", effect, f"{entry} >> /etc/hosts")
    took = time.monotonic() - begun
    text = f"{name} is {', '.join(map(str, led))}"
    known = {interface.address for interface in found}
    if outer is not None and all(str(address).startswith("127.") for address in led):
        effect = "torchrun's ranks on other hosts that are told it connect to themselves; samestep run does not use it"
        return Line("own name", "note", text, effect, mend)
    if not known.intersection(map(str, led)):
        effect = "ranks on other hosts that are told it reach somebody else"
        return Line("own name", "warning", f"{text}, which is not this host", effect, mend)
    if took > LONG:
        effect = "every start of a rank waits as long"
        return Line("own name", "warning", f"{text}, found after {took:.1f} s", effect, mend)
    return fine("own name", text)


def _interfaces(found: Sequence[Interface]) -> Line:
    text = ", ".join(f"{interface.name} {interface.address}" for interface in found)
    if all(interface.is_loopback for interface in found):
        effect = "runs over several hosts are not possible; on this one they are"
        return Line("interfaces", "note", text or "none", effect, "ip link; ip addr")
    return fine("interfaces", text)


def loopback() -> Line:
    """Sees whether two processes of this host could talk."""
    try:
        with (
            closing(socket.create_server(("127.0.0.1", 0))) as server,
            closing(socket.create_connection(server.getsockname(), timeout=2)),
        ):
            return fine("loopback", "answers")
    except OSError as error:
        effect = "ranks of one host do not find each other"
        return Line("loopback", "error", f"127.0.0.1 does not answer: {error}", effect, "ip link set lo up")


def ports(named: int = TORCHRUNS_PORT) -> Iterator[Line]:
    """Yields whether there are ports, and whether the one is free that scripts like to name."""
    try:
        first, last = map(int, RANGE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        first, last = 32768, 60999
    if last - first < FEWEST:
        effect = "many ranks on one host find no port"
        mend = f"sysctl -w net.ipv4.ip_local_port_range='32768 60999' (now {first} to {last})"
        yield Line("ports", "warning", f"{last - first + 1} to choose from", effect, mend)
    try:
        with closing(socket.create_server(("0.0.0.0", named))):  # noqa: S104  (closed at once)
            yield fine("ports", f"{first} to {last}; {named} is free")
    except OSError:
        effect = "torchrun, and scripts with a fixed MASTER_PORT, fail: 'address already in use'"
        mend = f"ss -ltnp sport = :{named} (samestep run takes a free port by itself)"
        yield Line("ports", "note", f"{named} is taken", effect, mend)


def chosen(found: Sequence[Interface]) -> Iterator[Line]:
    """Yields variables that name an interface which is not there."""
    there = sorted({interface.name for interface in found})
    for name in CHOSEN:
        value = variable(name)
        if not value or value.startswith("^"):
            continue
        wanted = [word.removeprefix("=").partition(":")[0] for word in value.split(",")]
        prefixes = name.startswith("NCCL") and not value.startswith("=")  # NCCL takes beginnings of names
        if not any(one == word or (prefixes and one.startswith(word)) for one in there for word in wanted):
            effect = "ranks find no network: the process group fails to form"
            yield Line(name, "error", f"is {value}; here are {', '.join(there)}", effect, f"unset {name}")


def adapters(folder: Path) -> Iterator[Line]:
    """Yields InfiniBand's ports, and those that are down."""
    for port in sorted(folder.glob("*/ports/*")):
        state, rate = ((port / name).read_text(encoding="ascii").strip() for name in ("state", "rate"))
        about, text = f"InfiniBand {port.parts[-3]}", f"port {port.name}: {state}, {rate}"
        if "ACTIVE" in state:
            yield fine(about, text)
        else:
            effect = "NCCL and MPI use the ports that are left, or TCP"
            yield Line(about, "warning", text, effect, "ibstat; see cable and subnet manager")
