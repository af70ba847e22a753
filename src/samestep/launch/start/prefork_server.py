"""Forks ranks, and whole launchers, from a process of its own that has imported torch once.

The caller cannot fork by itself: a copy of a process that has computed with OpenMP hangs in its first parallel loop.
The server computes nothing. It ends with its caller, and what it has started with it.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from pathlib import Path
from typing import Any, NoReturn

from samestep.launch.process import ForkedProcess, die_with_parent, exit_status, interpreter_command, start
from samestep.launch.rank.bootstrap import RankTask
from samestep.launch.start.fork import fork, fork_command, preimport
from samestep.rankenv import child_environment

_SOURCE = "import samestep"  # what is started here imports all of it sooner or later


class PreforkServer:
    """Starts ranks that answer calls, and launchers; its process starts with it, and ends at :meth:`close`.

    Several threads may use one. `variables` are laid over this process's own, and those that torch reads at its import
    count here; `modules` are imported beside torch and samestep.
    """

    def __init__(self, variables: Mapping[str, str | None], modules: Iterable[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        words = (str(os.getpid()), str(theirs.fileno()), *modules)
        with theirs:
            self._process = start(
                interpreter_command("samestep.launch.start.prefork_server", *words),
                child_environment(variables),
                keep=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()  # held from a request to its answer
        self._unavailable: tuple[str | None] | None = None

    def why_unavailable(self) -> str | None:
        """Returns why nothing can be forked here; None where it can. Waits until torch is imported."""
        with self._lock:
            if self._unavailable is None:
                try:
                    self._unavailable = (self._connection.recv(),)
                except (EOFError, OSError):
                    return "its process has ended"
        return self._unavailable[0]

    def start(
        self, task: RankTask, environment: Mapping[str, str], *, stdout: int | None, stderr: int | None
    ) -> ForkedProcess:
        """Starts one rank that answers calls; its streams are this process's own by default."""
        given = tuple(name for name in ("calls", "stacks", "progress") if getattr(task, name) is not None)
        streams = (1 if stdout is None else stdout, 2 if stderr is None else stderr)
        others = [getattr(task, name) for name in given]
        return self._request("start", task, given, dict(environment), descriptors=[*streams, *others])

    def command(self, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess:
        """Starts `samestep ARGUMENTS` in this process's directory; `output` is for both of its streams."""
        return self._request("command", Path.cwd(), list(arguments), dict(environment), descriptors=[output])

    def _request(self, *request: Any, descriptors: list[int]) -> ForkedProcess:
        with self._lock:
            self._connection.send(request)
            with socket.socket(fileno=os.dup(self._connection.fileno())) as link:
                sendfds(link, descriptors)
            pid: int = self._connection.recv()
        return ForkedProcess(pid, partial(self._look, pid))

    def _look(self, pid: int, reap: bool) -> int | None:
        try:
            with self._lock:
                self._connection.send(("reap" if reap else "look", pid))
                code: int | None = self._connection.recv()
        except (EOFError, OSError):
            return -signal.SIGKILL  # so all that it has started ends when the server has
        return code

    def has_ended(self) -> bool:
        return exit_status(self._process) is not None

    def close(self) -> None:
        """Ends the process, and whatever of its own is left.

        A copy of this process, such as a DataLoader's worker, may hold the socket too and live on: closing this end
        alone would then not be noticed.
        """
        with socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._process.wait()


def main() -> NoReturn:
    """Serves the process that has started this one until it hangs up."""
    _, parent, descriptor, *modules = sys.argv
    die_with_parent(int(parent))
    os.set_inheritable(int(descriptor), False)
    with suppress(EOFError, OSError):  # the caller has hung up
        _serve(Connection(int(descriptor)), modules)
    os._exit(0)


def _serve(connection: Connection, modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    connection.send(preimport(_SOURCE, Path(os.devnull)))
    started: dict[int, ForkedProcess] = {}
    while True:
        match connection.recv():
            case "start", task, given, environment:
                with _received(connection, 2 + len(given)) as (stdout, stderr, *others):
                    descriptors: dict[str, Any] = dict(zip(given, others, strict=True))
                    task = replace(task, **descriptors)
                    process = fork(task, environment, stdin=None, stdout=stdout, stderr=stderr)
                started[process.pid] = process
                connection.send(process.pid)
            case "command", folder, arguments, environment:
                os.chdir(folder)
                with _received(connection, 1) as (output,):
                    process = fork_command(arguments, environment, output)
                started[process.pid] = process
                connection.send(process.pid)
            case "look", pid:
                connection.send(exit_status(started[pid]))
            case "reap", pid:
                connection.send(started.pop(pid).wait())


@contextmanager
def _received(connection: Connection, number: int) -> Iterator[list[int]]:
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        descriptors = recvfds(link, number)
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
