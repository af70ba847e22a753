"""A rendezvous address that is bound and kept, and the store that rank 0 serves on it.

torchrun takes port 29500, or asks the kernel for a free port, closes it and hopes that it is still free when rank 0
binds it again. Here the parent binds port 0 on the loopback address and keeps the socket; rank 0 inherits it and
serves torch's TCPStore on it (`master_listen_fd`), so nothing is ever guessed and nobody can take the port between.
Told an address, TCPStore listens on every interface; given this socket it listens on 127.0.0.1 alone.

Every rank then is a client, rank 0 too. Until the server runs, clients wait in the socket's backlog.

torchrun tells its ranks so by TORCHELASTIC_USE_AGENT_STORE=True, which their children inherit and which holds for any
address: a script that sets a MASTER_PORT of its own, as many tutorials do, or spawns ranks of its own, waits for ever
for a server. Here it holds in the rank alone, and as long as MASTER_PORT is the launcher's (:func:`use_store`).
"""

from __future__ import annotations

import socket
import sys
from types import ModuleType
from typing import Any

from samestep.errors import UsageError
from samestep.launch.imports import when_imported
from samestep.rankenv import set_variables, variable

__all__: list[str] = []

LOOPBACK = "127.0.0.1"
DISCARD = 9
BACKLOG = 4096  # ranks that may knock before rank 0 has imported torch; the kernel caps it at somaxconn

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_ports: list[str] = []  # where somebody serves it, as the launcher told this process
_stores: list[Any] = []  # what serves must outlive the script: clients fail when it is collected


def check_loopback() -> None:
    """Sees whether ranks of this host could meet.

    Raises:
        UsageError: 127.0.0.1 cannot be reached, as in a new network namespace; torch would try for minutes.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, DISCARD))  # sends nothing: asks for a way there
        except OSError as error:
            raise UsageError(
                f"{LOOPBACK} cannot be reached ({error.strerror}), where ranks of a host meet: ip link set lo up"
            ) from error


def listen_on_loopback() -> socket.socket:
    """Returns a socket that listens on a free port of 127.0.0.1; its port is `getsockname()[1]`."""
    check_loopback()
    return listen(LOOPBACK)


def listen(address: str) -> socket.socket:
    """Returns a socket that listens on a free port of `address`, one of this host's own, and on no other."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def serve_store(listener: socket.socket, size: int) -> None:
    """Serves a TCPStore for `size` ranks on `listener`, from the moment this process imports torch.distributed.

    It does not import torch itself: what the script sets before its own `import torch` (OMP_NUM_THREADS, say) would
    come too late in rank 0, and in rank 0 only. A store served earlier is given up.
    """
    address, port = listener.getsockname()

    def serve(_: ModuleType) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        _stores[:] = [
            TCPStore(
                address,
                port,
                size,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        ]

    when_imported("torch.distributed", serve)


def use_store() -> None:
    """Makes this process a client of the launcher's store, for as long as MASTER_PORT says so."""
    if variable(AGENT_STORE) != "True":
        return
    port = variable("MASTER_PORT")
    set_variables({AGENT_STORE: None})
    use_stores_at([] if port is None else [port])


def served_ports() -> list[str]:
    """Returns the ports of :func:`use_store`, for processes that this one spawns."""
    return [*_ports]


def use_stores_at(ports: list[str]) -> None:
    """Makes this process a client of the store on these ports: a process that a rank spawns keeps its MASTER_PORT."""
    _ports[:] = ports

    def patch(_: ModuleType) -> None:
        rendezvous = vars(sys.modules["torch.distributed.rendezvous"])
        create = rendezvous["_create_c10d_store"]

        def create_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
            rendezvous["_torchelastic_use_agent_store"] = lambda: is_served(str(port))  # tcp:// names a port of its own
            return create(hostname, port, *args, **kwargs)

        rendezvous["_create_c10d_store"] = create_store

    when_imported("torch.distributed", patch)


def is_served(port: str | None = None) -> bool:
    """Tells whether the launcher has somebody serve the store at a port, by default at MASTER_PORT."""
    return variable(AGENT_STORE) == "True" or (variable("MASTER_PORT") if port is None else port) in _ports
