"""A rendezvous address that is bound and kept, and the store that rank 0 serves on it.

The parent binds a free port and keeps the socket; rank 0 inherits it and serves torch's TCPStore on it, so no other
program can take the port in between. Every rank is a client, rank 0 too; until the server runs, clients wait in the
backlog.
"""

from __future__ import annotations

import functools
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from samestep.errors import UsageError
from samestep.launch.process import interpreter_command
from samestep.launch.rank.import_hooks import when_imported
from samestep.rankenv import child_environment, set_variables, variable

LOOPBACK = "127.0.0.1"
DISCARD = 9
BACKLOG = 4096  # ranks that may connect before rank 0 has imported torch; the kernel caps it at somaxconn
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_ENV_POSITION = 10  # of `env` among the arguments of subprocess.Popen
_MAY_JOIN = re.compile(r"python|\.py\b|\.sh\b|torchrun|accelerate|deepspeed")  # commands that may start ranks

_ports: list[str] = []  # where it is served, as the launcher told this process
_patched: list[bool] = []  # subprocess.Popen is
_stores: list[Any] = []  # what serves must outlive the script: clients fail when it is collected
_pending: list[tuple[socket.socket, int, Callable[[], None]]] = []  # listener and size of what is not served yet


def check_loopback() -> None:
    """Raises UsageError where 127.0.0.1 cannot be reached, as in a new network namespace; torch would try for long."""
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

    def serve(_: ModuleType) -> None:
        _pending.clear()
        _stores[:] = [_open_store(listener, size)]

    _pending[:] = [(listener, size, lambda: None)]
    cancel = when_imported("torch.distributed", serve)
    if _pending:
        _pending[:] = [(listener, size, cancel)]


def _open_store(listener: socket.socket, size: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = listener.getsockname()
    descriptor = listener.detach()
    return TCPStore(
        address, port, size, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )


def use_store() -> None:
    """Makes this process a client of the launcher's store, for as long as MASTER_PORT says so.

    torchrun says it by TORCHELASTIC_USE_AGENT_STORE, which children inherit and which holds for any address: a script
    that sets a MASTER_PORT of its own, or spawns ranks of its own, would wait for ever for a server.
    """
    if variable(AGENT_STORE) != "True":
        return
    port = variable("MASTER_PORT")
    set_variables({AGENT_STORE: None})
    use_stores_at([] if port is None else [port])


def served_ports() -> list[str]:
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
    if not _patched:
        _patched.append(True)
        _let_programs_use_it()


def is_served(port: str | None = None) -> bool:
    """Tells whether the launcher's store is served at a port, by default at MASTER_PORT."""
    return variable(AGENT_STORE) == "True" or (variable("MASTER_PORT") if port is None else port) in _ports


# --- programs that a rank starts ------------------------------------------------------------------

# They are interpreters of their own, with nothing of ours in them but what is in their environment. Where they are
# ranks, and this process has not imported torch.distributed, a further process serves the store for them.


def _let_programs_use_it() -> None:
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def start(self: Any, *arguments: Any, **options: Any) -> None:
        given = options.get("env")
        environment = child_environment({}) if given is None else given
        if environment.get("MASTER_PORT") in _ports and len(arguments) <= _ENV_POSITION:
            options["env"] = {**environment, AGENT_STORE: "True"}
            if _pending and _MAY_JOIN.search(str(arguments[0] if arguments else options.get("args"))):
                _serve_in_another_process(original)
        original(self, *arguments, **options)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def _serve_in_another_process(start: Callable[..., None]) -> None:
    listener, size, cancel = _pending.pop()
    cancel()
    command = interpreter_command("samestep.launch.rank.store", str(listener.fileno()), str(size))
    server = subprocess.Popen.__new__(subprocess.Popen)
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}  # it ends with its standard input
    start(server, command, pass_fds=[listener.fileno()], start_new_session=True, **streams)
    listener.close()
    _stores[:] = [server]


if __name__ == "__main__":
    _stores[:] = [_open_store(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))]
    sys.stdin.read()
