"""Ranks that stay alive and answer calls: what `samestep.spawn` and the tests' ranks are built on.

Each rank sees torchrun's variables before its interpreter starts, so that OMP_NUM_THREADS counts, and each call has a
rendezvous of its own.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import IO, Any, Self

from samestep.errors import RankFailure, UsageError
from samestep.launch.functions.calls import LaunchRequest, dump_call, with_cell_names
from samestep.launch.functions.forwarder import OutputForwarder
from samestep.launch.process import Process, reap, signal_group, start, wait_all
from samestep.launch.rank.bootstrap import RankTask
from samestep.launch.rank.environment import RankLayout, rank_variables
from samestep.launch.rank.failure import FailureRecord, death
from samestep.launch.rank.store import listen_on_loopback
from samestep.launch.result import find_root_cause
from samestep.launch.start.prefork_server import PreforkServer
from samestep.rankenv import child_environment
from samestep.text import rank_list

CAUSE_S = 2.0  # to wait for a better reason than "my peer is gone"
GRACE_S = 2.0  # between asking a rank to end and ending it


@dataclass
class _PoolRank:
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
        forwarder: passes on what the ranks print; without one they write where this process does.
        server: forks the ranks, with its own `extra`; without one each is a fresh interpreter.

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
        forwarder: OutputForwarder | None = None,
        server: PreforkServer | None = None,
    ) -> None:
        if size < 1:
            raise UsageError(f"a world has at least one rank, not {size}: ask for 1 or more")
        self.size = size
        self._extra = dict(extra or {})
        self._forwarder = forwarder or OutputForwarder(size)
        self._server = server
        self._layout = RankLayout(size=size, port=0, run_id=secrets.token_hex(4))
        self._ranks: list[_PoolRank] = []
        try:
            for rank in range(size):
                with _interrupts_wait():
                    self._ranks.append(self._start(rank))
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int) -> _PoolRank:
        ours, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the rank)
        environment = child_environment(rank_variables(self._layout, rank) | self._extra)
        with theirs, self._forwarder.open_streams(rank) as (streams, record):
            task = RankTask(calls=theirs.fileno(), stacks=stacks.fileno(), progress=record)
            if self._server is not None:
                process: Process = self._server.start(task, environment, **streams)
            else:
                process = start(task.command(), environment, keep=task.descriptors(), **streams)
        return _PoolRank(rank, process, Connection(ours.detach()), stacks)

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
        self._layout = replace(self._layout, restarts=self._layout.restarts + 1)
        with listen_on_loopback() as listener:
            layout = replace(self._layout, port=listener.getsockname()[1])
            for one in self._ranks:
                variables = rank_variables(layout, one.rank) | self._extra
                module = _module_of(module_of or fn)
                request = LaunchRequest(variables, list(sys.path), module, payload, one.rank == 0)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died; _collect says how
                    one.connection.send(request)
                    if request.brings_listener:
                        send_handle(one.connection, listener.fileno(), 0)
        return self._collect(None if timeout is None else time.monotonic() + timeout, timeout)

    def _collect(self, deadline: float | None, timeout: float | None) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[FailureRecord] = []
        while len(results) + len(failures) < self.size:
            done = {*results, *(failure.rank for failure in failures)}
            pending = [one for one in self._ranks if one.rank not in done]
            ready = self._forwarder.wait([item for one in pending for item in (one.connection, one.handle)], deadline)
            if not ready:
                if failures:
                    break
                raise self._no_answer(pending, timeout)
            for one in [one for one in pending if ready & {one.connection, one.handle}]:
                outcome, value = _receive(one)
                if outcome != "raised":
                    results[one.rank] = value
                    self._forwarder.returned += 1
                    continue
                failures.append(value)
                if not value.lost_peer:
                    raise _as_error(value, failures, self.size)
                until = time.monotonic() + CAUSE_S
                deadline = until if deadline is None else min(deadline, until)
        cause = find_root_cause(failures, {rank: self._ranks[rank].process.pid for rank in results}, self.size)
        if cause is not None:
            raise _as_error(cause, failures, self.size)
        return [results[rank] for rank in range(self.size)]

    def _no_answer(self, pending: list[_PoolRank], timeout: float | None) -> RankFailure:
        """Makes the silent ranks dump their stacks (faulthandler, on SIGABRT) and says where they were."""
        for one in pending:
            one.process.send_signal(signal.SIGABRT)
        wait_all([one.process for one in pending], GRACE_S)
        ranks = [one.rank for one in pending]
        reason = [f"gave no answer within {timeout:g} s"]
        if len(ranks) > 1:
            reason.append(f", like ranks {', '.join(map(str, ranks[1:]))}")
        for one in pending:
            one.stacks.seek(0)
            stack = one.stacks.read().decode(errors="replace").strip()
            reason.append(f"\nrank {one.rank} was at:\n{stack}")
        return RankFailure(ranks[0], "".join(reason), 124)

    def close(self) -> None:
        """Lets the ranks end by themselves, and ends those that do not."""
        for one in self._ranks:
            one.connection.close()
        deadline, running = time.monotonic() + GRACE_S, {one.handle for one in self._ranks}
        try:
            while running and (ended := self._forwarder.wait(running, deadline)):
                running -= ended
        finally:
            self.kill()

    def kill(self) -> None:
        with _interrupts_wait():
            for one in self._ranks:
                reap(one.process)
                one.close()
            self._ranks.clear()
            self._forwarder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.close()
            return
        with _interrupts_wait():
            for one in self._ranks:
                signal_group(one.process, signal.SIGTERM)
            wait_all([one.process for one in self._ranks], GRACE_S)
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


def _receive(one: _PoolRank) -> tuple[str, Any]:
    with contextlib.suppress(EOFError, ConnectionResetError):
        if one.connection.poll():
            answer: tuple[str, Any] = pickle.loads(one.connection.recv_bytes())  # noqa: S301  (our own child)
            return answer
    wait_all([one.process], GRACE_S)
    return "raised", death(one.rank, one.process.pid, reap(one.process))


def _as_error(cause: FailureRecord, failures: list[FailureRecord], size: int) -> RankFailure:
    """Returns the caller's error: the culprit, its own traceback, and which ranks lost their connection to it."""
    reason = f"of {size} failed: {cause.exception}: {cause.message}"
    if cause.where is not None:
        reason += f"\n  at {cause.line}"
    victims = [failure.rank for failure in failures if failure.rank != cause.rank and failure.lost_peer]
    if victims:
        reason += f"\n  {rank_list(victims)} lost {'its' if len(victims) == 1 else 'their'} connection to it"
    if cause.traceback:
        reason += f"\n\n{cause.traceback}"
    return RankFailure(cause.rank, with_cell_names(reason), cause.exit_code)


def _module_of(fn: Callable[..., Any]) -> tuple[str, str] | None:
    """Returns name and file of the module that defines `fn`, for a rank to import; None for `__main__` or a C one."""
    name = getattr(fn, "__module__", None)
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return None if name in {None, "__main__"} or file is None else (name, str(Path(file)))
