"""Ranks that stay alive and answer calls: what `samestep.spawn` and the tests' ranks stand on.

torch.multiprocessing.spawn starts its processes without an environment, leaves the port to the caller, and loses
what the function returned. Here each rank sees torchrun's variables (from before its interpreter started, so that
OMP_NUM_THREADS counts), each call gets a rendezvous of its own, and results come back in rank order.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from samestep.errors import RankFailure, UsageError
from samestep.launch.address import listen_on_loopback
from samestep.launch.attending import OutputForwarder
from samestep.launch.bootstrap import RankTask
from samestep.launch.calls import LaunchRequest, dump_call, failure_of, send_job
from samestep.launch.cells import with_cell_names
from samestep.launch.failure import FailureRecord, death, root_cause
from samestep.launch.nursery import PreforkServer
from samestep.launch.process import Process, rank_command, reap, start, stop_all, wait_all
from samestep.launch.variables import RankLayout, rank_variables
from samestep.rankenv import child_environment
from samestep.text import rank_list

__all__: list[str] = []

PATIENCE = 2.0  # seconds to wait for a better reason than "my peer is gone"
GRACE = 2.0  # seconds between asking a rank to end and ending it


@dataclass
class _Member:
    """One rank as the caller sees it."""

    rank: int
    process: Process
    connection: Connection
    stacks: IO[bytes]
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = os.pidfd_open(self.process.pid)

    def close(self) -> None:
        os.close(self.handle)
        self.stacks.close()
        self.connection.close()


class RankPool:
    """`size` rank processes that answer calls until closed; a context manager.

    Args:
        size: how many ranks.
        extra: environment variables laid over this process's own; None removes one.
        attendant: passes on what the ranks print; without one they write where this process does.
        nursery: forks the ranks, with its own `extra`; without one each is a fresh interpreter.

    Example:
        >>> with RankPool(2) as pool:
        ...     pool.call(max, (1, 2))
        [2, 2]
    """

    def __init__(
        self,
        size: int,
        *,
        extra: Mapping[str, str | None] | None = None,
        attendant: OutputForwarder | None = None,
        nursery: PreforkServer | None = None,
    ) -> None:
        if size < 1:
            raise UsageError(f"a world has at least one rank, not {size}: ask for 1 or more")
        self.size = size
        self._extra = dict(extra or {})
        self._attendant = attendant or OutputForwarder(size)
        self._nursery = nursery
        self._group = RankLayout(size=size, port=0, run_id=secrets.token_hex(4))
        self._members: list[_Member] = []
        try:
            for rank in range(size):
                with _interrupts_wait():
                    self._members.append(self._start(rank))
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int) -> _Member:
        ours, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the rank)
        environment = child_environment(rank_variables(self._group, rank) | self._extra)
        with theirs, self._attendant.admit(rank) as means:
            assignment = RankTask(calls=theirs.fileno(), stacks=stacks.fileno(), progress=means.record)
            process = self._begin(assignment, environment, stdout=means.stdout, stderr=means.stderr)
        return _Member(rank, process, Connection(ours.detach()), stacks)

    def _begin(self, assignment: RankTask, environment: Mapping[str, str], **streams: int | None) -> Process:
        if self._nursery is not None:
            return self._nursery.start(assignment, environment, **streams)
        return start(rank_command(*assignment.options()), environment, keep=assignment.descriptors(), **streams)

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        timeout: float | None = None,
        module_of: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """Returns `[fn(*args) on rank 0, on rank 1, …]`.

        Args:
            fn: any function; its results travel by pickle.
            args: its arguments, the same on every rank.
            timeout: seconds until the ranks' stacks are dumped and the call fails; None waits for ever.
            module_of: the function whose module the ranks import first; `fn` by default.

        Raises:
            RankFailure: a rank raised, died or did not answer in time. The pool is of no use any more.
        """
        payload = dump_call(fn, args)
        self._group = replace(self._group, restarts=self._group.restarts + 1)
        with listen_on_loopback() as listener:
            group = replace(self._group, port=listener.getsockname()[1])
            for member in self._members:
                variables = rank_variables(group, member.rank) | self._extra
                job = LaunchRequest(variables, list(sys.path), _module_of(module_of or fn), payload, member.rank == 0)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died; _collect says how
                    send_job(member.connection, job, listener)
        return self._collect(None if timeout is None else time.monotonic() + timeout, timeout)

    def _collect(self, deadline: float | None, timeout: float | None) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[FailureRecord] = []
        while len(results) + len(failures) < self.size:
            done = {*results, *(failure.rank for failure in failures)}
            pending = [member for member in self._members if member.rank not in done]
            ready = self._wait(pending, deadline)
            if not ready:
                if failures:
                    break
                raise self._silence(pending, timeout)
            for member in ready:
                outcome, value = _receive(member)
                failure = failure_of((outcome, value))
                if failure is None:
                    results[member.rank] = value
                    self._attendant.returned += 1
                    continue
                failures.append(failure)
                if not failure.lost_peer:
                    raise _as_error(failure, failures, self.size)
                patience = time.monotonic() + PATIENCE
                deadline = patience if deadline is None else min(deadline, patience)
        blamed = root_cause(failures, self._processes(results), self.size)
        if blamed is not None:
            raise _as_error(blamed, failures, self.size)
        return [results[rank] for rank in range(self.size)]

    def _wait(self, pending: list[_Member], deadline: float | None) -> list[_Member]:
        """Returns the members that have answered or died; none when the deadline came first."""
        ready = self._attendant.wait(
            [item for member in pending for item in (member.connection, member.handle)], deadline
        )
        return [member for member in pending if ready & {member.connection, member.handle}]

    def _processes(self, ranks: Iterable[int]) -> dict[int, int]:
        return {rank: self._members[rank].process.pid for rank in ranks}

    def _silence(self, pending: list[_Member], timeout: float | None) -> RankFailure:
        """Makes the silent ranks dump their stacks (faulthandler, on SIGABRT) and tells where they stood."""
        for member in pending:
            member.process.send_signal(signal.SIGABRT)
        wait_all([member.process for member in pending], GRACE)
        ranks = [member.rank for member in pending]
        reason = [f"gave no answer within {timeout:g} s"]
        if len(ranks) > 1:
            reason.append(f", like ranks {', '.join(map(str, ranks[1:]))}")
        for member in pending:
            member.stacks.seek(0)
            stack = member.stacks.read().decode(errors="replace").strip()
            reason.append(f"\nrank {member.rank} was at:\n{stack}")
        return RankFailure(ranks[0], "".join(reason), 124)

    def close(self) -> None:
        """Lets the ranks end by themselves, and ends those that do not."""
        for member in self._members:
            member.connection.close()
        deadline, running = time.monotonic() + GRACE, {member.handle for member in self._members}
        try:
            while running and (ended := self._attendant.wait(running, deadline)):
                running -= ended
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the ranks and everything they started, at once."""
        with _interrupts_wait():
            for member in self._members:
                reap(member.process)
                member.close()
            self._members.clear()
            self._attendant.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with _interrupts_wait():
            stop_all([member.process for member in self._members], GRACE)
            self.kill()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Lets Ctrl-C take effect afterwards: no rank is left half started, and pressed twice it leaves none alive."""
    if threading.current_thread() is not threading.main_thread():  # only that is ever interrupted
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _receive(member: _Member) -> tuple[str, Any]:
    """Returns a rank's answer, or the failure that its death amounts to."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        if member.connection.poll():
            answer: tuple[str, Any] = pickle.loads(member.connection.recv_bytes())  # noqa: S301  (our own child)
            return answer
    wait_all([member.process], GRACE)
    return "raised", death(member.rank, member.process.pid, reap(member.process))


def _as_error(blamed: FailureRecord, failures: list[FailureRecord], size: int) -> RankFailure:
    """Returns what the caller is told: the culprit, its own traceback, and which ranks lost their connection to it."""
    reason = f"of {size} failed: {blamed.exception}: {blamed.message}"
    if blamed.where is not None:
        reason += f"\n  at {blamed.where}  {blamed.source or ''}".rstrip()
    victims = [failure.rank for failure in failures if failure.rank != blamed.rank and failure.lost_peer]
    if victims:
        reason += f"\n  {rank_list(victims)} lost {'its' if len(victims) == 1 else 'their'} connection to it"
    if blamed.traceback:
        reason += f"\n\n{blamed.traceback}"
    return RankFailure(blamed.rank, with_cell_names(reason), blamed.exit_code)


def _module_of(fn: Callable[..., Any]) -> tuple[str, str] | None:
    """Returns name and file of the module that defines `fn`, for a rank to import; None for `__main__` or a C one."""
    name = getattr(fn, "__module__", None)
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return None if name in {None, "__main__"} or file is None else (name, str(Path(file)))
