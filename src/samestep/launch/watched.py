"""The rank's side of a watcher: how a rank that `samestep run` has not started is watched over all the same.

    start_watcher         in one rank of each host: starts samestep.launch.watcher; the others are told its address
    connect_to_watcher    in every rank: hands over its record and its stacks, and what it fails with from then on

The address is an abstract socket: it is gone with the watcher, and no file has to be cleared away. Whoever connects
must be a process of the same user.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from types import TracebackType

from samestep import progress
from samestep.launch import progress_notes
from samestep.launch.control import Control
from samestep.launch.spawned import describe_with_spawned
from samestep.launch.stacks import STACKS_SIGNAL

__all__: list[str] = []

ANSWER = 20.0  # seconds for the watcher to start and to take notice

_watched: list[bool] = []


def is_watched() -> bool:
    """Tells whether somebody watches over this process already: `samestep run`, a pool, or a watcher."""
    return bool(_watched)


def note_watched() -> None:
    """Says that somebody does."""
    _watched[:] = [True]


def start_watcher(ranks: int, size: int) -> str:
    """Starts the watcher of this host, and returns where the ranks find it.

    Args:
        ranks: how many there are on this host.
        size: how many in all.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"samestep-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(ranks)
        options = ("--listen", listener.fileno(), "--ranks", ranks, "--size", size)
        subprocess.Popen(  # it ends by itself; nobody waits for it
            [sys.executable, "-P", "-m", "samestep.launch.watcher", *map(str, options)],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return name


def connect_to_watcher(name: str, rank: int) -> None:
    """Connects this process to the watcher of its host; where that does not answer, it goes on without."""
    record, stacks = progress.create(), tempfile.TemporaryFile()  # noqa: SIM115  (faulthandler keeps it open)
    stream = _connect(name, rank, [stacks.fileno(), record])
    if stream is None:
        os.close(record)
        stacks.close()
        return
    note_watched()
    progress.attach(record)
    os.register_at_fork(after_in_child=progress.detach)
    progress_notes.begin()
    if not faulthandler.is_enabled():
        faulthandler.enable(file=stacks, all_threads=True)  # the watcher shows what is written there
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    control = Control(stream.detach(), binding=False)
    control.obey()
    _tell_ends(control, rank)


def _connect(name: str, rank: int, descriptors: list[int]) -> socket.socket | None:
    """Hands the descriptors over; returns the connection once the watcher holds them, None where it never does."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(ANSWER)
    try:
        stream.connect(f"\0{name}")
        socket.send_fds(stream, [str(rank).encode()], descriptors)
        if stream.recv(1):
            stream.settimeout(None)
            return stream
    except OSError:
        pass
    stream.close()
    return None


def _tell_ends(control: Control, rank: int) -> None:
    """Tells of an exception that nobody catches, before whoever prints it, and of an end in good order."""
    hook, process = sys.excepthook, os.getpid()

    def tell_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = os.getpid() == process  # and not one that it has forked
        failure = describe_with_spawned(error, rank)
        if own:
            control.tell("failed", failure=asdict(failure))
        hook(kind, error, trace)
        if own and failure.lost_peer:
            control.await_end(ANSWER)

    def tell_end() -> None:
        if os.getpid() == process:
            control.tell("leaving")

    sys.excepthook = tell_failure
    atexit.register(tell_end)
