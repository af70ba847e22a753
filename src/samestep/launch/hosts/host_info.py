"""What a host is and has, as its agent tells the controller before any rank starts."""

from __future__ import annotations

import hashlib
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

from samestep._version import __version__
from samestep.launch.cpus import read_cores, unbound_cores
from samestep.launch.hosts.network import addresses
from samestep.launch.rank.script import find_module
from samestep.launch.resources import visible_gpus
from samestep.machine import machine


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """One host; it travels as JSON."""

    name: str  # what the controller calls it
    host: str  # what it calls itself
    python: str
    torch: str | None  # version; None where it is not installed
    samestep: str
    gpus: int  # how many its ranks would see
    cpus: tuple[int, ...]  # of the agent's affinity
    cores: int  # how many of them its ranks may keep busy
    unbound: int  # how many there would be if nothing bound the agent
    digest: str | None  # of the script's content; None where it is not there
    directory: str  # where the agent works
    ranks: int | None = None  # how many it brings, where it knows that itself
    interfaces: tuple[tuple[str, str], ...] = ()  # names and addresses
    machine: str = ""  # names its kernel

    @property
    def place(self) -> tuple[str, str]:
        """Where its cores are: cloned machines have one name, and containers of one machine cores of their own."""
        return self.host, self.machine

    def address_on(self, interface: str) -> str | None:
        return next((address for name, address in self.interfaces if name == interface), None)


def inspect_host(program: str, *, is_module: bool, name: str | None = None, ranks: int | None = None) -> HostInfo:
    """Returns what this host is and has; `name` is what the controller calls it, by default its own name."""
    cores = read_cores()
    return HostInfo(
        name=name or socket.gethostname(),
        host=socket.gethostname(),
        ranks=ranks,
        interfaces=tuple((interface.name, interface.address) for interface in addresses()),
        python=platform.python_version(),
        torch=_version("torch"),
        samestep=__version__,
        gpus=visible_gpus(),
        cpus=cores.usable,
        cores=cores.count,
        unbound=unbound_cores(),
        digest=digest(program, is_module=is_module),
        directory=str(Path.cwd()),
        machine=machine(),
    )


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # 12 ms that a run on this host alone can do without

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def digest(program: str, *, is_module: bool) -> str | None:
    """Returns a digest of the script's, or the module's, content; None where there is none to be found."""
    try:
        origin = find_module(program) if is_module else None
        path = Path((origin.origin or "") if origin is not None else program)
        path = path / "__main__.py" if path.is_dir() else path
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ImportError, ValueError):
        return None
