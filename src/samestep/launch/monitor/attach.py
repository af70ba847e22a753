"""Connects a rank that something else than `samestep run` has started to a watcher of its host.

One rank of each host starts samestep.launch.monitor.watcher, the others get its address: an abstract socket, which is
gone with the watcher.
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
from samestep.launch.process import interpreter_command, start
from samestep.launch.rank import progress_notes
from samestep.launch.rank.control import Control
from samestep.launch.rank.failure import describe
from samestep.launch.rank.user_code import STACKS_SIGNAL
from samestep.rankenv import child_environment

ANSWER_S = 20.0  # for the watcher to start and to take notice

_watched: list[bool] = []


def is_watched() -> bool:
    """Tells whether this process is watched already: by `samestep run`, a pool, or a watcher."""
    return bool(_watched)


def set_watched() -> None:
    _watched[:] = [True]


def start_watcher(ranks: int, size: int) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"samestep-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(ranks)
        words = map(str, (listener.fileno(), ranks, size))
        command = interpreter_command("samestep.launch.monitor.watcher", *words)
        start(command, child_environment({}), keep=[listener.fileno()], stdout=subprocess.DEVNULL)  # it ends by itself
    return name


def connect_to_watcher(name: str, rank: int) -> None:
    """Connects this process to the watcher of its host; where that does not answer, it goes on without."""
    record, stacks = progress.create(), tempfile.TemporaryFile()  # noqa: SIM115  (faulthandler keeps it open)
    stream = _connect(name, rank, [stacks.fileno(), record])
    if stream is None:
        os.close(record)
        stacks.close()
        return
    set_watched()
    progress.attach(record)
    os.register_at_fork(after_in_child=progress.detach)
    progress_notes.begin()
    if not faulthandler.is_enabled():
        faulthandler.enable(file=stacks, all_threads=True)  # the watcher shows what is written there
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    control = Control(stream.detach(), stacks.fileno(), binding=False)
    control.start()
    _report_end(control, rank)


def _connect(name: str, rank: int, descriptors: list[int]) -> socket.socket | None:
    """Hands the descriptors over; returns the connection once the watcher holds them, None where it never does."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(ANSWER_S)
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


def _report_end(control: Control, rank: int) -> None:
    hook, process = sys.excepthook, os.getpid()

    def report_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = os.getpid() == process  # and not one that it has forked
        failure = describe(error, rank)
        if own:
            control.send("failed", failure=asdict(failure))
        hook(kind, error, trace)
        if own and failure.lost_peer:  # torchrun blames the first rank that ends, and stops whatever still speaks
            control.await_end(ANSWER_S)

    def report_leaving() -> None:
        if os.getpid() == process:
            control.send("leaving")

    sys.excepthook = report_failure
    atexit.register(report_leaving)
