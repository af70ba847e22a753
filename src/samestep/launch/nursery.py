"""Ranks, and whole launchers, forked from a process of its own that has imported torch once.

    caller                        nursery                          rank, or `samestep run`
                           <-     ready, or why not: torch is imported, once
      start assignment, …    ->
      descriptors            ->     fork                    ->       answers calls, or starts ranks
                             <-     its process number
      reap pid               ->     waitpid
                             <-     its exit code

`samestep.testing.ranks` starts its sets from one: a set that a failure has ended is replaced in 0.1 s. The runs of
`samestep verify` are forked from another. Fresh interpreters import torch and its compiler for 2 to 5 s each. The
caller cannot fork by itself: a copy of a process that has computed with OpenMP hangs in its first parallel loop. The
nursery computes nothing. It ends with its caller, and what it has started with it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from pathlib import Path
from typing import Any, NoReturn

from samestep.launch.bootstrap import RankTask
from samestep.launch.fork import fork, fork_command, warm
from samestep.launch.process import Forked, die_with_parent, exit_status, signal_alone, start
from samestep.rankenv import child_environment

__all__: list[str] = []

_SOURCE = "import samestep"  # what is started here imports all of it sooner or later


class PreforkServer:
    """Starts ranks that answer calls, and launchers; its process starts with it, and ends at :meth:`close`.

    Several threads may use one.

    Args:
        variables: environment variables laid over this process's own; those that torch reads at its import count here.
        modules: imported beside torch and samestep.
    """

    def __init__(self, variables: Mapping[str, str | None], modules: Iterable[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
        options = ("--parent", str(os.getpid()), "--orders", str(theirs.fileno()), *modules)
        with theirs:
            self._process = start(
                [sys.executable, *flags, "-P", "-m", "samestep.launch.nursery", *options],
                child_environment(variables),
                keep=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()  # held from an order to its answer
        self._objection: tuple[str | None] | None = None

    def objection(self) -> str | None:
        """Returns why nothing can be forked here; None where it can. Waits until torch is imported."""
        with self._lock:
            if self._objection is None:
                try:
                    self._objection = (self._connection.recv(),)
                except (EOFError, OSError):
                    return "its process has ended"
        return self._objection[0]

    def start(
        self, assignment: RankTask, environment: Mapping[str, str], *, stdout: int | None, stderr: int | None
    ) -> Nursling:
        """Starts one rank.

        Args:
            assignment: what it does; one that answers calls.
            environment: all its variables.
            stdout: where its standard output goes; this process's own by default.
            stderr: the same for standard error.
        """
        brought = tuple(name for name in ("calls", "stacks", "progress") if getattr(assignment, name) is not None)
        streams = (1 if stdout is None else stdout, 2 if stderr is None else stderr)
        others = [getattr(assignment, name) for name in brought]
        return self._ask("start", assignment, brought, dict(environment), descriptors=[*streams, *others])

    def command(self, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> Nursling:
        """Starts `samestep ARGUMENTS`, where this process stands.

        Args:
            arguments: what follows the program's name.
            environment: all its variables.
            output: a descriptor for its standard output and standard error.
        """
        return self._ask("command", Path.cwd(), list(arguments), dict(environment), descriptors=[output])

    def _ask(self, *order: Any, descriptors: list[int]) -> Nursling:
        with self._lock:
            self._connection.send(order)
            with socket.socket(fileno=os.dup(self._connection.fileno())) as link:
                sendfds(link, descriptors)
            return Nursling(self, self._connection.recv())

    def look(self, pid: int, *, reap: bool) -> int | None:
        """Returns the exit code of what was started, None while it runs; waits for its end if it is to be reaped."""
        try:
            with self._lock:
                self._connection.send(("reap" if reap else "look", pid))
                code: int | None = self._connection.recv()
        except (EOFError, OSError):
            return -signal.SIGKILL  # so all that it has started ends when the nursery has
        return code

    def has_ended(self) -> bool:
        """Whether the process is gone, as after the kernel has killed it for memory."""
        return exit_status(self._process) is not None

    def close(self) -> None:
        """Ends the process, and whatever of its own is left.

        A copy of this process, such as a DataLoader's worker, may hold the socket too and live on: closing this end
        alone would then not be heard.
        """
        with socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._process.wait()


class Nursling:
    """What a nursery has started: a :class:`samestep.launch.process.Process` that is not this process's child."""

    def __init__(self, nursery: PreforkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def status(self) -> int | None:
        """Returns its exit code once it has ended, without reaping it."""
        return self._nursery.look(self.pid, reap=False)

    def wait(self) -> int:
        """Reaps it, and returns its exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = self._nursery.look(self.pid, reap=True)
            assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Sends it a signal, unless it was reaped."""
        signal_alone(self, number)


def main() -> NoReturn:
    """Serves the process that has started this one until it hangs up."""
    parser = argparse.ArgumentParser(prog="samestep.launch.nursery", allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True, help="end when this process ends")
    parser.add_argument("--orders", type=int, required=True, help="hear it on this inherited socket")
    parser.add_argument("modules", nargs="*", help="import these too")
    options = parser.parse_args()
    die_with_parent(options.parent)
    os.set_inheritable(options.orders, False)
    with suppress(EOFError, OSError):  # the caller has hung up
        _serve(Connection(options.orders), options.modules)
    os._exit(0)


def _serve(connection: Connection, modules: list[str]) -> None:
    connection.send(_objection(modules))
    started: dict[int, Forked] = {}
    while True:
        match connection.recv():
            case "start", assignment, brought, environment:
                with _received(connection, 2 + len(brought)) as (stdout, stderr, *others):
                    given: dict[str, Any] = dict(zip(brought, others, strict=True))
                    rank = fork(replace(assignment, **given), environment, stdin=None, stdout=stdout, stderr=stderr)
                started[rank.pid] = rank
                connection.send(rank.pid)
            case "command", folder, arguments, environment:
                os.chdir(folder)
                with _received(connection, 1) as (output,):
                    launcher = fork_command(arguments, environment, output)
                started[launcher.pid] = launcher
                connection.send(launcher.pid)
            case "look", pid:
                connection.send(exit_status(started[pid]))
            case "reap", pid:
                connection.send(started.pop(pid).wait())


def _objection(modules: list[str]) -> str | None:
    for name in modules:
        importlib.import_module(name)
    return warm(_SOURCE, Path(os.devnull))


@contextmanager
def _received(connection: Connection, number: int) -> Iterator[list[int]]:
    """The descriptors that come with an order; they are closed again here."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        descriptors = recvfds(link, number)
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
