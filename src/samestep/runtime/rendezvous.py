"""Where the ranks meet: a key-value store from `env://`, `tcp://`, `file://`, or what srun and mpiexec leave behind.

torch's own rendezvous waits 30 minutes for a rank that never comes and then names nobody; a file of a dead run sends
it to addresses where nobody listens. Here a rank signs in under its number, so that everybody can say who is missing,
who is there twice, and who left the file behind:

    store    samestep/rank/0 = {"host", "pid", "size", "torch", "device", …}    set by compare-and-set: first come [1]
             samestep/rank/1 = …                                                read by all, so all check the same [2]

A file is only where they find each other; then rank 0 serves the store, and the file goes. torch stays in it to the
end, and whatever uses its FileStore after the last rank has removed the file makes it anew: the next run of the same
name finds the leftovers of a clean one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult, parse_qs, urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from samestep import rankenv
from samestep.errors import RankVariablesError, RendezvousError, UsageError
from samestep.launch.address import LOOPBACK, is_served, listen
from samestep.launch.meeting import publish, rendezvous_path, wait_for
from samestep.launch.network import addresses, route_to
from samestep.machine import namespace
from samestep.runtime.entries import compare, entry_of

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's number, and how it finds the others.

    Attributes:
        method: "tcp" (`host` and `port`), "file" (`path`), or "meeting": rank 0 tells its address in the file `path`.
        serves: this rank runs the store; false where the launcher does.
        one_host: the launcher says that all ranks are on this host.
        prefix: keeps the keys of one attempt apart from those of the one before.
    """

    rank: int
    size: int
    method: str
    host: str = ""
    port: int = 0
    path: str = ""
    serves: bool = False
    one_host: bool = False
    prefix: str = ""

    @property
    def address(self) -> str:
        """Where the ranks meet, as a person writes it."""
        return f"tcp://{self.host}:{self.port}" if self.method == "tcp" else f"file://{self.path}"


def locate(
    init_method: str | None,
    told: rankenv.RankVariables | None,
    rank: int | None,
    size: int | None,
) -> Place:
    """Returns where this rank meets the others.

    Args:
        init_method: "env://", "tcp://host:port" or "file:///path", or None for whatever the launcher set.
        told: the launcher's variables, or None.
        rank: this rank's number, if the caller says so rather than the launcher.
        size: the number of ranks, likewise.

    Raises:
        UsageError: the method is unknown, or neither caller nor launcher says which rank this is.
    """
    parts = urlsplit(init_method or "env://")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    rank, size = _numbers(init_method, told, query, rank, size)
    if parts.scheme == "tcp":
        if not parts.hostname or not _port(parts):
            raise UsageError(f"init_method {init_method!r} needs a host and a port, such as tcp://10.0.0.1:29500")
        return Place(rank=rank, size=size, method="tcp", host=parts.hostname, port=_port(parts), serves=rank == 0)
    if parts.scheme == "file":
        path = (parts.netloc + parts.path) or ""
        if not path.startswith("/"):
            raise UsageError(f"init_method {init_method!r} needs an absolute path that all ranks see: file:///path")
        return Place(rank=rank, size=size, method="file", path=path, serves=rank == 0)
    if parts.scheme == "env":
        return _from_variables(told, rank, size)
    raise UsageError(f"init_method {init_method!r} is unknown: use env://, tcp://host:port or file:///path")


def _port(parts: SplitResult) -> int:
    """The address's port, 0 where it has none that could be one."""
    try:
        return parts.port or 0
    except ValueError:
        return 0


def _numbers(
    init_method: str | None,
    told: rankenv.RankVariables | None,
    query: dict[str, str],
    rank: int | None,
    size: int | None,
) -> tuple[int, int]:
    """The caller's word counts first, then the address's query, then the launcher's variables."""
    rank = rank if rank is not None else _whole(query, "rank")
    size = size if size is not None else _whole(query, "world_size")
    if told is not None:
        rank = told.rank if rank is None else rank
        size = told.size if size is None else size
    if rank is None or size is None:
        raise RankVariablesError(
            f"rank and world size are unknown: {init_method or 'env://'} needs rank= and size=, "
            "or RANK and WORLD_SIZE in the environment"
        )
    if told is not None and init_method in {None, "env://"} and (told.rank, told.size) != (rank, size):
        raise RankVariablesError(
            f"the caller says rank {rank} of {size}, the launcher rank {told.rank} of {told.size}: leave rank= and "
            "size= out, or give an init_method of your own"
        )
    if not 0 <= rank < size:
        raise RankVariablesError(f"rank is {rank} but the world's size is {size}: ranks count from 0 to size - 1")
    return rank, size


def _whole(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise RankVariablesError(f"{name} in the address must be a whole number, and is {text!r}")
    return int(text)


def _from_variables(told: rankenv.RankVariables | None, rank: int, size: int) -> Place:
    addr, port = (None, None) if told is None else (told.master_addr, told.master_port)
    if addr is not None and port is not None:
        served = is_served()
        attempt = rankenv.variable("TORCHELASTIC_RESTART_COUNT", "0")
        return Place(
            rank=rank,
            size=size,
            method="tcp",
            host=addr,
            port=port,
            serves=rank == 0 and not served,
            prefix=f"/samestep/attempt_{attempt}",
        )
    source = "env" if told is None else told.source
    if told is not None and source != "env":
        path, here = str(rendezvous_path(told, "ranks")), bool(told.one_host)
        return Place(rank=rank, size=size, method="meeting", path=path, serves=rank == 0, one_host=here)
    missing = [name for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if value is None]
    raise RankVariablesError(
        f"rank {rank} of {size} ({source}) does not know where rank 0 is: {' and '.join(missing)} not set. "
        "Start the script with `samestep run`, or set them to rank 0's host and a free port there"
    )


class _Joined:
    """How many worlds this process has joined; the same on all ranks, since they joined them together."""

    worlds = 0
    files: ClassVar[list[Path]] = []  # that rank 0 has told its address in; of no use once all have signed in


def open_store(place: Place, join_timeout_s: float) -> Store:
    """Returns a client of the store at `place`, serving it first where this rank is the one that does.

    Raises:
        RendezvousError: the port is taken, or nobody answered within `join_timeout_s` seconds.
    """
    if place.method == "file":
        return _meet_in(_file_store(place), place, join_timeout_s)
    if place.method == "meeting":
        return _meet(place, join_timeout_s)
    return _client(place, join_timeout_s)


def _client(place: Place, join_timeout_s: float, listener: socket.socket | None = None) -> Store:
    """Returns a client of the store at an address; rank 0 serves it first, on `listener` if that is bound already."""
    began = time.monotonic()
    if not place.serves and not _answers(place.host, place.port, began + join_timeout_s):
        raise RendezvousError(_unreachable(place, time.monotonic() - began, None))
    try:
        store: Store = TCPStore(
            place.host,
            place.port,
            is_master=place.serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=join_timeout_s),
            multi_tenant=True,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        raise RendezvousError(_unreachable(place, time.monotonic() - began, error)) from error
    # The store may outlive a world: a second world of the same processes must not read the first one's keys.
    return PrefixStore(f"{place.prefix}/world_{_Joined.worlds}", store)


def _meet(place: Place, join_timeout_s: float) -> Store:
    """Joins tasks that nobody has told an address: rank 0 binds one, and tells it through a file."""
    path = Path(f"{place.path}.{_Joined.worlds}")
    if place.serves:
        listener = _listen(one_host=place.one_host)
        _Joined.files.append(path)
        publish(path, _told(listener))
        return _serve(listener, place, join_timeout_s)
    return _serve(wait_for(path, join_timeout_s), place, join_timeout_s)


def _meet_in(file: FileStore, place: Place, join_timeout_s: float) -> Store:
    """Joins ranks that share a file; rank 0 removes it once all have signed in at the store they found through it.

    torch's FileStore removes its file too, but not when the last two ranks leave it at the same time (1 time in 100):
    each counts itself out before it looks whether it was the last.
    """
    file.set_timeout(timedelta(seconds=join_timeout_s))
    signed = _signed(
        file,
        place,
        {"host": socket.gethostname(), "pid": os.getpid(), "network": namespace("net") or socket.gethostname()},
        join_timeout_s,
    )
    if place.serves:
        listener = _listen(one_host=all(entry["network"] == signed[0]["network"] for entry in signed))
        _Joined.files.append(_file(place))
        file.set("samestep/store", json.dumps(_told(listener)))
        return _serve(listener, place, join_timeout_s)
    try:
        told = json.loads(file.get("samestep/store"))
    except RuntimeError as error:  # torch's, when its time is over
        raise RendezvousError(
            f"rank 0 has signed in at {place.address}, and not told rank {place.rank} where its store is: did it end?"
        ) from error
    return _serve(told, place, join_timeout_s)


def _listen(*, one_host: bool) -> socket.socket:
    return listen(LOOPBACK if one_host else addresses()[0].address)


def _told(listener: socket.socket) -> dict[str, Any]:
    host, port = listener.getsockname()
    return {"addresses": [host], "port": port}


def _serve(where: socket.socket | dict[str, Any], place: Place, join_timeout_s: float) -> Store:
    """Returns a client of the store that rank 0 serves on a socket, which is there in rank 0 alone."""
    told = where if isinstance(where, dict) else _told(where)
    host, port = told["addresses"][0], told["port"]
    _choose_interface(host)
    found = replace(place, method="tcp", host=host, port=port)
    return _client(found, join_timeout_s, None if isinstance(where, dict) else where)


def _choose_interface(host: str) -> None:
    """Lets gloo use the interface that leads to rank 0: it would look up this host's own name, which may be unknown."""
    way = route_to(host)
    if way is not None and rankenv.variable("GLOO_SOCKET_IFNAME") is None:
        rankenv.set_variables({"GLOO_SOCKET_IFNAME": way.name})


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


def _unreachable(place: Place, waited_s: float, error: Exception | None) -> str:
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return (
            f"rank {place.rank} cannot serve {place.address}: port {place.port} is taken on this host, by another "
            "program or by a second rank 0. Choose another port, or start with `samestep run`, which never guesses one"
        )
    if place.serves and error is not None:
        return f"rank {place.rank} cannot serve {place.address}: {_first_line(error)}"
    return (
        f"rank {place.rank} of {place.size} waited {waited_s:.1f} s for rank 0 at host {place.host}, port "
        f"{place.port}, and nobody answered: check that rank 0 runs, that the address is its own, and that no "
        "firewall is between"
    )


def _file(place: Place) -> Path:
    """Returns the file of this world: a second one of the same processes must not read the first one's address."""
    return Path(place.path + (f".{_Joined.worlds}" if _Joined.worlds else ""))


def _file_store(place: Place) -> FileStore:
    folder = Path(place.path).parent
    if not folder.is_dir():
        raise RendezvousError(f"rank {place.rank} cannot meet at {place.address}: the folder {folder} does not exist")
    try:
        return FileStore(str(_file(place)), place.size)
    except RuntimeError as error:
        raise RendezvousError(f"rank {place.rank} cannot meet at {place.address}: {_first_line(error)}") from error


def sign_in(store: Store, place: Place, about: dict[str, Any], join_timeout_s: float) -> list[dict[str, Any]]:
    """Writes down who this rank is, waits for all, and returns what every rank wrote, in rank order.

    Args:
        store: where they meet.
        place: this rank's number and address.
        about: JSON facts about this process; must hold "host" and "pid".
        join_timeout_s: how long to wait for the others.

    Raises:
        RendezvousError: a rank is missing, there twice, or the file is left over from a dead run.
    """
    try:
        signed = _signed(store, place, about, join_timeout_s)
    finally:
        while _Joined.files:
            _Joined.files.pop().unlink(missing_ok=True)
    compare(signed)
    _Joined.worlds += 1
    return signed


def _signed(store: Store, place: Place, about: dict[str, Any], join_timeout_s: float) -> list[dict[str, Any]]:
    mine = json.dumps({**about, "size": place.size})
    found = store.compare_set(_key(place.rank), "", mine)  # [1]
    if found != mine.encode():
        raise RendezvousError(_taken(place, entry_of(found, place.rank), about))
    began = time.monotonic()
    keys = [_key(rank) for rank in range(place.size)]
    try:
        store.wait(keys, timedelta(seconds=join_timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RendezvousError(_missing(place, missing, time.monotonic() - began)) from error
    return [entry_of(store.get(key), rank) for rank, key in enumerate(keys)]  # [2]


def _key(rank: int) -> str:
    return f"samestep/rank/{rank}"


def _taken(place: Place, other: dict[str, Any], about: dict[str, Any]) -> str:
    who = f"pid {other['pid']} on {other['host']}"
    if place.method == "file" and other["host"] != about["host"]:
        return (
            f"{place.address} is in use, or left over from a dead run: {who} signed in there as rank {place.rank}. "
            f"Give every run a path of its own; where that process is gone, delete the file"
        )
    if place.method == "file" and not Path(f"/proc/{other['pid']}").exists():
        return (
            f"{place.address} is left over from a dead run: {who} signed in there as rank {place.rank} and is gone. "
            f"Delete the file, and give every run a path of its own"
        )
    return f"rank {place.rank} is there twice: {who} signed in first at {place.address}; ranks must differ"


def _missing(place: Place, missing: list[int], waited_s: float) -> str:
    names = ", ".join(map(str, missing))
    return (
        f"rank {place.rank} waited {waited_s:.1f} s at {place.address}, and {len(missing)} of {place.size} ranks "
        f"never came: {names}. Start them too, or check that they were given the same address"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
