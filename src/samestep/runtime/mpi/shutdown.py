"""How ranks end MPI: none leaves while others wait for it, and none waits for one that is gone.

`MPI_Finalize` returns when all ranks have called it: a rank that failed would wait there for ranks that wait for it.
A rank that never calls it makes mpiexec end all others, which is wrong where it merely was done first. So a rank that
ends reports how many calls it made in each communicator. One that waits in a later call raises PeerError and reports
that; then the rank that ended leaves with its own exit code, without MPI_Finalize, and the other leaves after it, so
that mpiexec hears of the culprit first. Where all leave and none reports a failed wait, all call MPI_Finalize,
whatever their exit codes.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from samestep.errors import PeerError
from samestep.launch.process import (
    end_for_mpiexec,
    is_known_to_fail,
    pending_exit_code,
    set_exit_code,
    skips_exit_handlers,
)
from samestep.launch.rank.excepthook import write_stderr

LEAVING, WAIT_FAILED = 1, 2  # tags
POLL_INTERVAL_S = 0.02  # while the others still work
GRACE_S = 5.0  # for mpiexec to hear of the culprit before it hears of this rank


class ShutdownProtocol:
    """What the ranks tell each other of their ends, over a communicator of its own. Collective to make."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._communicator = mpi.COMM_WORLD.Dup()
        self._counts: Counter[str] = Counter()
        self._left: dict[int, Mapping[str, int]] = {}  # the counts of ranks that have left
        self._process = os.getpid()
        self._sent: list[Any] = []
        self._others_lost_us = self._lost_peer = False
        self._leaving = False

    def count(self, key: str) -> int:
        """Counts one more call, or message, of a kind; returns its number from 1."""
        self._counts[key] += 1
        return self._counts[key]

    def check(self, what: str, needed: Mapping[int, tuple[str, int]]) -> None:
        """Raises PeerError where a rank has left that this one waits for in `what`.

        `needed` has, by rank, the key and the number that it must have counted to.
        """
        self._receive()
        for rank, (key, number) in needed.items():
            if rank in self._left and self._left[rank].get(key, 0) < number:
                self._lost_peer = True
                self._send(rank, WAIT_FAILED, {})
                raise PeerError(f"rank {rank} has ended, and this rank waits for it in {what}")

    def shutdown(self) -> None:
        """Finalises MPI if all ranks leave, or lets this process leave without it if it has failed or is waited for."""
        if os.getpid() != self._process or self._leaving or self._mpi.Is_finalized():
            return
        self._leaving = True
        if self._lost_peer and pending_exit_code() is None:
            time.sleep(GRACE_S)
        if self._lost_peer or is_known_to_fail() or hasattr(sys, "last_type"):  # an exception that was not caught
            return
        for rank in range(self._communicator.size):
            if rank != self._communicator.rank:
                self._send(rank, LEAVING, self._counts)
        if self._all_leave():
            self._mpi.Finalize()
            if skips_exit_handlers():
                end_for_mpiexec()
        elif not pending_exit_code():
            write_stderr(f"samestep: rank {self._communicator.rank} has ended while others waited for it\n")
            os._exit(1)  # mpiexec would take a 0 for the whole job's

    def _all_leave(self) -> bool:
        """Waits until all leave; false if another rank has waited for this one in vain."""
        together = self._communicator.Ibarrier()
        while not together.Test():
            self._receive()
            if self._others_lost_us:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True

    def _send(self, rank: int, tag: int, counts: Mapping[str, int]) -> None:
        text = json.dumps(dict(counts)).encode()
        self._sent.append((self._communicator.Isend([text, self._mpi.BYTE], rank, tag), text))

    def _receive(self) -> None:
        status = self._mpi.Status()
        while (message := self._communicator.Improbe(status=status)) is not None:
            text = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([text, self._mpi.BYTE])
            if status.tag == LEAVING:
                self._left[status.source] = json.loads(text)
            else:
                self._others_lost_us = True


def _record_exit_code() -> None:
    """Records the exit code of `sys.exit`: atexit handlers are not told."""
    leave = sys.exit

    @functools.wraps(leave)
    def record(code: Any = None, /) -> NoReturn:
        set_exit_code(code if isinstance(code, int) else int(code is not None))
        leave(code)

    sys.exit = record


@functools.cache
def shutdown_protocol(mpi: Any) -> ShutdownProtocol:
    """Returns the process's protocol, made with its first group. Collective then."""
    protocol = ShutdownProtocol(mpi)
    atexit.register(protocol.shutdown)
    _record_exit_code()
    return protocol
