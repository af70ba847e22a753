"""Where the ranks meet: a key-value store from `env://`, `tcp://`, `file://`, or what srun and mpiexec leave behind.

Each rank registers under its number, by compare-and-set, so that an error can say who is missing, who is there twice,
and who left a file behind; all ranks read all registrations, so all check the same. A file is only where they find
each other: then rank 0 serves the store and removes the file. Whatever uses torch's FileStore after the last rank has
removed the file makes it anew, and the next run of the same name would find it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from samestep import rankenv
from samestep.errors import RankVariablesError, RendezvousError, UsageError
from samestep.launch.hosts.network import addresses, route_to
from samestep.launch.hosts.rendezvous_file import rendezvous_path, wait_for, write
from samestep.launch.rank.store import LOOPBACK, is_served, listen
from samestep.machine import namespace
from samestep.rankenv import RankVariables
from samestep.runtime.store_messages import check_ranks_agree, decode_registration

_worlds = 0  # that this process has joined; the same on all ranks, since they joined them together
_files: list[Path] = []  # in which rank 0 has published its address; of no use once all have registered


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    rank: int
    size: int
    # "tcp" (`host` and `port`), "file" (a FileStore at `path`), or "published": rank 0 publishes its address in the
    # file `path`
    method: str
    host: str = ""
    port: int = 0
    path: str = ""
    serves: bool = False  # this rank runs the store; false where the launcher does
    one_host: bool = False  # the launcher says that all ranks are on this host
    prefix: str = ""  # separates the keys of one attempt from those of the one before

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}" if self.method == "tcp" else f"file://{self.path}"


def parse_init_method(
    init_method: str | None, launcher_env: RankVariables | None, rank: int | None, size: int | None
) -> Rendezvous:
    """Returns where this rank meets the others: as `init_method` says, or None for whatever the launcher set."""
    parts = urlsplit(init_method or "env://")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    rank, size = _rank_and_size(init_method, launcher_env, query, rank, size)
    if parts.scheme == "tcp":
        if not parts.hostname or not (port := _port(parts)):
            raise UsageError(f"init_method {init_method!r} needs a host and a port, such as tcp://10.0.0.1:29500")
        return Rendezvous(rank=rank, size=size, method="tcp", host=parts.hostname, port=port, serves=rank == 0)
    if parts.scheme == "file":
        path = parts.netloc + parts.path
        if not path.startswith("/"):
            raise UsageError(f"init_method {init_method!r} needs an absolute path that all ranks see: file:///path")
        return Rendezvous(rank=rank, size=size, method="file", path=path, serves=rank == 0)
    if parts.scheme == "env":
        return _from_environment(launcher_env, rank, size)
    raise UsageError(f"init_method {init_method!r} is unknown: use env://, tcp://host:port or file:///path")


def _port(parts: SplitResult) -> int:
    """The address's port, 0 where it has none that could be one."""
    try:
        return parts.port or 0
    except ValueError:
        return 0


def _rank_and_size(
    init_method: str | None, env: RankVariables | None, query: dict[str, str], rank: int | None, size: int | None
) -> tuple[int, int]:
    """The caller's arguments come first, then the address's query, then the launcher's variables."""
    rank = rank if rank is not None else _number_in(query, "rank")
    size = size if size is not None else _number_in(query, "world_size")
    if env is not None:
        rank = env.rank if rank is None else rank
        size = env.size if size is None else size
    if rank is None or size is None:
        raise RankVariablesError(
            f"rank and world size are unknown: {init_method or 'env://'} needs rank= and size=, "
            "or RANK and WORLD_SIZE in the environment"
        )
    if env is not None and init_method in {None, "env://"} and (env.rank, env.size) != (rank, size):
        raise RankVariablesError(
            f"the caller says rank {rank} of {size}, the launcher rank {env.rank} of {env.size}: leave rank= and "
            "size= out, or give an init_method of your own"
        )
    if not 0 <= rank < size:
        raise RankVariablesError(f"rank is {rank} but the world's size is {size}: ranks count from 0 to size - 1")
    return rank, size


def _number_in(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise RankVariablesError(f"{name} in the address must be a whole number, and is {text!r}")
    return int(text)


def _from_environment(env: RankVariables | None, rank: int, size: int) -> Rendezvous:
    addr, port = (None, None) if env is None else (env.master_addr, env.master_port)
    if addr is not None and port is not None:
        prefix = f"/samestep/attempt_{rankenv.variable('TORCHELASTIC_RESTART_COUNT', '0')}"
        serves = rank == 0 and not is_served()
        return Rendezvous(rank=rank, size=size, method="tcp", host=addr, port=port, serves=serves, prefix=prefix)
    source = "env" if env is None else env.source
    if env is not None and source != "env":
        path, here = str(rendezvous_path(env, "ranks")), bool(env.one_host)
        return Rendezvous(rank=rank, size=size, method="published", path=path, serves=rank == 0, one_host=here)
    missing = [name for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if value is None]
    raise RankVariablesError(
        f"rank {rank} of {size} ({source}) does not know where rank 0 is: {' and '.join(missing)} not set. "
        "Start the script with `samestep run`, or set them to rank 0's host and a free port there"
    )


def connect_store(point: Rendezvous, join_timeout_s: float) -> Store:
    """Returns a client of the store, which rank 0 serves first unless the launcher does."""
    if point.method == "file":
        return _connect_via_file_store(_file_store(point), point, join_timeout_s)
    if point.method == "published":
        return _connect_via_published_file(point, join_timeout_s)
    return _connect(point, join_timeout_s)


def _connect(point: Rendezvous, join_timeout_s: float, listener: socket.socket | None = None) -> Store:
    """Connects to the store at an address; rank 0 serves it first, on `listener` if that is bound already."""
    began = time.monotonic()
    if not point.serves and not _answers(point.host, point.port, began + join_timeout_s):
        raise RendezvousError(_unreachable(point, time.monotonic() - began, None))
    try:
        store: Store = TCPStore(
            point.host,
            point.port,
            is_master=point.serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=join_timeout_s),
            multi_tenant=True,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        raise RendezvousError(_unreachable(point, time.monotonic() - began, error)) from error
    # The store may outlive a world: a second world of the same processes must not read the first one's keys.
    return PrefixStore(f"{point.prefix}/world_{_worlds}", store)


def _connect_via_published_file(point: Rendezvous, join_timeout_s: float) -> Store:
    """Connects tasks that were given no address: rank 0 binds one, and publishes it in a file."""
    path = Path(f"{point.path}.{_worlds}")
    if not point.serves:
        return _connect_to(wait_for(path, join_timeout_s), point, join_timeout_s)
    listener, address = _listen(one_host=point.one_host)
    _files.append(path)
    write(path, address)
    return _connect_to(address, point, join_timeout_s, listener)


def _connect_via_file_store(file: FileStore, point: Rendezvous, join_timeout_s: float) -> Store:
    """Connects ranks that share a file; rank 0 removes it once all have registered at the store found through it.

    torch's FileStore removes its file too, but not when the last two ranks leave it at the same time (1 time in 100):
    each counts itself out before it looks whether it was the last.
    """
    file.set_timeout(timedelta(seconds=join_timeout_s))
    about = {"host": socket.gethostname(), "pid": os.getpid(), "network": namespace("net") or socket.gethostname()}
    registrations = _register(file, point, about, join_timeout_s)
    if point.serves:
        listener, address = _listen(
            one_host=all(entry["network"] == registrations[0]["network"] for entry in registrations)
        )
        _files.append(_file(point))
        file.set("samestep/store", json.dumps(address))
        return _connect_to(address, point, join_timeout_s, listener)
    try:
        address = json.loads(file.get("samestep/store"))
    except RuntimeError as error:  # torch's, at its timeout
        raise RendezvousError(
            f"rank 0 has registered at {point.address}, and not told rank {point.rank} where its store is: did it end?"
        ) from error
    return _connect_to(address, point, join_timeout_s)


def _listen(*, one_host: bool) -> tuple[socket.socket, dict[str, Any]]:
    listener = listen(LOOPBACK if one_host else addresses()[0].address)
    host, port = listener.getsockname()
    return listener, {"addresses": [host], "port": port}


def _connect_to(
    address: dict[str, Any], point: Rendezvous, join_timeout_s: float, listener: socket.socket | None = None
) -> Store:
    host = address["addresses"][0]
    # gloo must use the interface that leads to rank 0: it would look up this host's own name, which may be unknown
    way = route_to(host)
    if way is not None and rankenv.variable("GLOO_SOCKET_IFNAME") is None:
        rankenv.set_variables({"GLOO_SOCKET_IFNAME": way.name})
    return _connect(replace(point, method="tcp", host=host, port=address["port"]), join_timeout_s, listener)


def _answers(host: str, port: int, deadline: float) -> bool:
    """Whether somebody accepts connections there in time; torch's own client can wait far beyond its timeout."""
    pause_s = 0.01
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left_s).close()
        except OSError:  # refused, unreachable, unknown name: rank 0 may still be on its way
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, 0.5)
        else:
            return True
    return False


def _unreachable(point: Rendezvous, waited_s: float, error: Exception | None) -> str:
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return (
            f"rank {point.rank} cannot serve {point.address}: port {point.port} is taken on this host, by another "
            "program or by a second rank 0. Choose another port, or start with `samestep run`, which never guesses one"
        )
    if point.serves and error is not None:
        return f"rank {point.rank} cannot serve {point.address}: {_first_line(error)}"
    return (
        f"rank {point.rank} of {point.size} waited {waited_s:.1f} s for rank 0 at host {point.host}, port "
        f"{point.port}, and nobody answered: check that rank 0 runs, that the address is its own, and that no "
        "firewall is between"
    )


def _file(point: Rendezvous) -> Path:
    """Returns the file of this world: a second one of the same processes must not read the first one's address."""
    return Path(point.path + (f".{_worlds}" if _worlds else ""))


def _file_store(point: Rendezvous) -> FileStore:
    folder = Path(point.path).parent
    if not folder.is_dir():
        raise RendezvousError(f"rank {point.rank} cannot meet at {point.address}: the folder {folder} does not exist")
    try:
        return FileStore(str(_file(point)), point.size)
    except RuntimeError as error:
        raise RendezvousError(f"rank {point.rank} cannot meet at {point.address}: {_first_line(error)}") from error


def register_rank(
    store: Store, point: Rendezvous, about: dict[str, Any], join_timeout_s: float
) -> list[dict[str, Any]]:
    """Registers this rank, waits for all, and returns every rank's registration, in rank order.

    `about` are JSON facts about this process; they must hold "host" and "pid".
    """
    global _worlds  # noqa: PLW0603
    try:
        registrations = _register(store, point, about, join_timeout_s)
    finally:
        while _files:
            _files.pop().unlink(missing_ok=True)
    check_ranks_agree(registrations)
    _worlds += 1
    return registrations


def _register(store: Store, point: Rendezvous, about: dict[str, Any], join_timeout_s: float) -> list[dict[str, Any]]:
    mine = json.dumps({**about, "size": point.size})
    keys = [f"samestep/rank/{rank}" for rank in range(point.size)]
    found = store.compare_set(keys[point.rank], "", mine)
    if found != mine.encode():
        raise RendezvousError(_duplicate(point, decode_registration(found, point.rank), about))
    began = time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=join_timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RendezvousError(_missing(point, missing, time.monotonic() - began)) from error
    return [decode_registration(store.get(key), rank) for rank, key in enumerate(keys)]


def _duplicate(point: Rendezvous, other: dict[str, Any], about: dict[str, Any]) -> str:
    who = f"pid {other['pid']} on {other['host']}"
    if point.method == "file" and other["host"] != about["host"]:
        return (
            f"{point.address} is in use, or left over from a dead run: {who} signed in there as rank {point.rank}. "
            f"Give every run a path of its own; where that process is gone, delete the file"
        )
    if point.method == "file" and not Path(f"/proc/{other['pid']}").exists():
        return (
            f"{point.address} is left over from a dead run: {who} signed in there as rank {point.rank} and is gone. "
            f"Delete the file, and give every run a path of its own"
        )
    return f"rank {point.rank} is there twice: {who} signed in first at {point.address}; ranks must differ"


def _missing(point: Rendezvous, missing: list[int], waited_s: float) -> str:
    names = ", ".join(map(str, missing))
    return (
        f"rank {point.rank} waited {waited_s:.1f} s at {point.address}, and {len(missing)} of {point.size} ranks "
        f"never came: {names}. Start them too, or check that they were given the same address"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
