"""Waits on all ranks of a run, passes on what they write, and ends the rest after a failure.

    running --a rank fails--> settling --all ended, or time is over--> stopping --grace is over--> killing
       |                      others may explain better,               SIGTERM                     SIGKILL
       |                      or end by themselves
       +--a signal arrives--> stopping, the signal passed on; a second one: killing

One loop over process handles, pipes and signals (pidfd_open(2), selectors): no thread, no polling. torchrun looks at
its workers every 0.1 s, waits 30 s for them to end, and forwards signals to all processes of their groups, so that
the workers of a DataLoader die before the rank can save.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from samestep.launch.console import Channel
from samestep.launch.failure import Failure, death
from samestep.launch.process import Process, exit_status, reap, signal_group
from samestep.launch.verdict import Verdict, judge

__all__: list[str] = []

SETTLE = 1.0  # seconds for the others to end by themselves after a rank's own failure
PATIENCE = 2.0  # seconds to wait for a better reason than "my peer is gone"
GRACE = 5.0  # seconds between asking a rank to end and ending it
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Watches the ranks of one run until all have ended.

    Args:
        processes: the ranks, in order.
        channels: their streams.
        records: where each rank writes down why it failed.
        on_resize: called when the terminal has changed its size.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        channels: Sequence[Channel],
        records: Sequence[Path],
        on_resize: Callable[[], None],
    ) -> None:
        self.processes = processes
        self.records = records
        self.on_resize = on_resize
        self.codes: dict[int, int] = {}
        self.failures: list[Failure] = []
        self.finished: dict[int, int] = {}  # rank and process that exited with code 0 before anybody failed
        self.interrupted: int | None = None
        self.stopped_at: float | None = None  # the clock when the launcher itself began to end ranks
        self.deadline: float | None = None
        self.next_step: Callable[[], None] = self._stop
        self.selector = selectors.DefaultSelector()
        for channel in channels:
            self.selector.register(channel.source, selectors.EVENT_READ, channel)
        for rank, process in enumerate(processes):
            self.selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)

    def wait(self) -> Verdict:
        """Returns when no rank is left, nor anything that one has started."""
        with _Signals() as signals:
            self.selector.register(signals.reader, selectors.EVENT_READ, signals)
            while len(self.codes) < len(self.processes):
                events = self.selector.select(self._time_left())
                for key, _ in events:
                    self._handle(key)
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    self.next_step()
            self.selector.unregister(signals.reader)
        for process in self.processes:
            reap(process)
        self._drain()
        return judge(self.codes, self._own_failures(), self.finished, self.interrupted)

    def _time_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def _handle(self, key: selectors.SelectorKey) -> None:
        match key.data:
            case Channel() as channel:
                if not channel.pump():
                    self._close(channel)
            case int() as rank:
                self.selector.unregister(key.fd)
                os.close(key.fd)
                self._ended(rank)
            case _Signals() as signals:
                for number in signals.read():
                    self._signalled(number)

    def _close(self, channel: Channel) -> None:
        self.selector.unregister(channel.source)
        channel.close()

    def _ended(self, rank: int) -> None:
        code = exit_status(self.processes[rank])
        assert code is not None
        self.codes[rank] = code
        if self.stopped_at is not None:
            return
        if code == 0:
            if not self.failures:
                self.finished[rank] = self.processes[rank].pid
            return
        failure = Failure.read(self.records[rank]) or death(rank, self.processes[rank].pid, code)
        if not self.failures or not failure.lost_peer:
            shared = failure.lost_peer or failure.usage  # others may say more, or the same
            self._arm(PATIENCE if shared else SETTLE, self._stop)
        self.failures.append(failure)

    def _arm(self, seconds: float, step: Callable[[], None]) -> None:
        """Takes `step` after `seconds`, or when an earlier deadline for it comes."""
        deadline = time.monotonic() + seconds
        earlier = self.deadline is not None and self.next_step == step
        self.deadline = min(deadline, self.deadline or deadline) if earlier else deadline
        self.next_step = step

    def _signalled(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self.on_resize()
        elif self.stopped_at is not None:
            self._kill()
        else:
            self.interrupted = number
            self.stopped_at = time.time()
            for rank in self._alive():  # to the rank alone: its DataLoader's workers must outlive its last save
                self.processes[rank].send_signal(number)
            self._arm(GRACE, self._kill)

    def _stop(self) -> None:
        self.stopped_at = time.time()
        for rank in self._alive():
            signal_group(self.processes[rank], signal.SIGTERM)
        self._arm(GRACE, self._kill)

    def _kill(self) -> None:
        self.deadline = None
        self.stopped_at = self.stopped_at or time.time()
        for rank in self._alive():
            signal_group(self.processes[rank], signal.SIGKILL)

    def _alive(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self.codes]

    def _drain(self) -> None:
        """Passes on what is still in the pipes. A process that left its rank's group may hold one open for ever."""
        while events := self.selector.select(0):
            for key, _ in events:
                self._handle(key)
        for key in list(self.selector.get_map().values()):
            self._close(key.data)
        self.selector.close()

    def _own_failures(self) -> list[Failure]:
        """Adds the ranks that had failed, but not yet ended, when the launcher began to end them."""
        known = {failure.rank for failure in self.failures}
        late = [Failure.read(path) for rank, path in enumerate(self.records) if rank not in known]
        before = self.stopped_at or 0.0
        return self.failures + [record for record in late if record is not None and record.time < before]


class _Signals:
    """The signals that reach the launcher, as a stream of numbers; a context manager."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        for end in (self.reader, self.writer):
            end.setblocking(False)
        self.numbers = (*FORWARDED, signal.SIGWINCH)

    def __enter__(self) -> Self:
        self.previous_wakeup = signal.set_wakeup_fd(self.writer.fileno())
        self.previous = {number: signal.signal(number, _nothing) for number in self.numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self.previous_wakeup)
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.reader.close()
        self.writer.close()

    def read(self) -> list[int]:
        return [number for number in self.reader.recv(64) if number in self.numbers]


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wakeup descriptor to be written."""
