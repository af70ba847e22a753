"""Ranks forked from a process of its own that has imported torch: what `samestep.testing.ranks` starts its sets from.

    caller                        nursery                          rank
                           <-     ready, or why not: torch is imported, once
      start assignment, …    ->
      descriptors            ->     fork                    ->       answers calls
                             <-     its process number
      reap pid               ->     waitpid
                             <-     its exit code

A set that a failure has ended is replaced in 0.1 s; fresh interpreters import torch for 1 to 3 s each. The caller
cannot fork by itself: a copy of a process that has computed with OpenMP hangs in its first parallel loop. The nursery
computes nothing. It ends with its caller, and its ranks with it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from pathlib import Path
from typing import Any, NoReturn

from samestep.launch.bootstrap import Assignment
from samestep.launch.fork import fork, warm
from samestep.launch.process import Forked, exit_status, follow_parent, signal_alone, start
from samestep.rankenv import child_environment

__all__: list[str] = []

_FOR_TESTS = "import samestep"  # such ranks import all of it sooner or later


class Nursery:
    """Starts ranks that answer calls; its process starts with it, and ends at :meth:`close`.

    Args:
        variables: environment variables laid over this process's own; those that torch reads at its import count here.
    """

    def __init__(self, variables: Mapping[str, str | None]) -> None:
        ours, theirs = socket.socketpair()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
        options = ("--parent", str(os.getpid()), "--orders", str(theirs.fileno()))
        with theirs:
            self._process = start(
                [sys.executable, *flags, "-P", "-m", "samestep.launch.nursery", *options],
                child_environment(variables),
                keep=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._objection: tuple[str | None] | None = None

    def objection(self) -> str | None:
        """Returns why no rank can be forked here; None where they can. Waits until torch is imported."""
        if self._objection is None:
            try:
                self._objection = (self._connection.recv(),)
            except (EOFError, OSError):
                return "its process has ended"
        return self._objection[0]

    def start(
        self, assignment: Assignment, environment: Mapping[str, str], *, stdout: int | None, stderr: int | None
    ) -> Nursling:
        """Starts one rank.

        Args:
            assignment: what it does; one that answers calls.
            environment: all its variables.
            stdout: where its standard output goes; this process's own by default.
            stderr: the same for standard error.
        """
        brought = tuple(name for name in ("calls", "stacks", "progress") if getattr(assignment, name) is not None)
        self._connection.send(("start", (assignment, brought, dict(environment))))
        streams = (1 if stdout is None else stdout, 2 if stderr is None else stderr)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            sendfds(link, [*streams, *(getattr(assignment, name) for name in brought)])
        return Nursling(self, self._connection.recv())

    def look(self, pid: int, *, reap: bool) -> int | None:
        """Returns the exit code of a rank, None while it runs; waits for its end if it is to be reaped."""
        try:
            self._connection.send(("reap" if reap else "look", pid))
            code: int | None = self._connection.recv()
        except (EOFError, OSError):
            return -signal.SIGKILL  # so ranks end when the nursery has
        return code

    def has_ended(self) -> bool:
        """Whether the process is gone, as after the kernel has killed it for memory."""
        return exit_status(self._process) is not None

    def close(self) -> None:
        """Ends the process, and whatever ranks are left."""
        self._connection.close()
        self._process.wait()


class Nursling:
    """A rank of a nursery: a :class:`samestep.launch.process.Process` that is not this process's child."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
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
    options = parser.parse_args()
    follow_parent(options.parent)
    os.set_inheritable(options.orders, False)
    with suppress(EOFError, OSError):  # the caller has hung up
        _serve(Connection(options.orders))
    os._exit(0)


def _serve(connection: Connection) -> None:
    connection.send(warm(_FOR_TESTS, Path(os.devnull)))
    ranks: dict[int, Forked] = {}
    while True:
        match connection.recv():
            case "start", (assignment, brought, environment):
                rank = _fork(connection, assignment, brought, environment)
                ranks[rank.pid] = rank
                connection.send(rank.pid)
            case "look", pid:
                connection.send(exit_status(ranks[pid]))
            case "reap", pid:
                connection.send(ranks.pop(pid).wait())


def _fork(
    connection: Connection, assignment: Assignment, brought: tuple[str, ...], environment: dict[str, str]
) -> Forked:
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        stdout, stderr, *others = recvfds(link, 2 + len(brought))
    given: dict[str, Any] = dict(zip(brought, others, strict=True))
    rank = fork(replace(assignment, **given), environment, stdin=None, stdout=stdout, stderr=stderr)
    for descriptor in (stdout, stderr, *others):
        os.close(descriptor)
    return rank


if __name__ == "__main__":
    main()
