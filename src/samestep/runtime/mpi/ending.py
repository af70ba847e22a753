"""Nobody leaves while others wait for him, and nobody waits for the dead.

`MPI_Finalize` returns when all ranks have called it. A rank that fails calls it too, by mpi4py's hand, and waits for
ranks that wait for it, for ever. A rank that never calls it makes mpiexec end all others: right where it has failed,
and wrong where it was merely done first. So a rank that ends tells the others how far it came in each communicator:

    rank 1  ends                                  rank 0  waits in call 17 of group 0
    left {"group 0": 16}  ──────────────────────>         16 < 17: rank 1 will not come: PeerError
                          <──────────────────────  mourned
    leaves with its own exit code, unfinalised            leaves after that, so that mpiexec hears of rank 1 first

    all have left, and nobody mourns: MPI_Finalize, whatever their exit codes
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
from samestep.launch.telling import write_stderr

__all__: list[str] = []

LEFT, MOURNED = 1, 2  # tags
LOOK_S = 0.02  # between looks while the others still work
GRACE_S = 5.0  # for mpiexec to hear of the culprit before it hears of us


class Ending:
    """What the ranks tell each other of their ends, over a communicator of its own. Collective to make.

    Args:
        mpi: the library.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._communicator = mpi.COMM_WORLD.Dup()
        self._counts: Counter[str] = Counter()
        self._left: dict[int, Mapping[str, int]] = {}
        self._process = os.getpid()
        self._sent: list[Any] = []
        self._mourned = self._mourns = False
        self._has_left = False

    def count(self, key: str) -> int:
        """Counts one more call, or message, of a kind; returns its number from 1."""
        self._counts[key] += 1
        return self._counts[key]

    def check(self, what: str, came: Mapping[int, tuple[str, int]]) -> None:
        """Raises PeerError where a rank has left that will not come.

        Args:
            what: this rank waits in.
            came: by rank, the key and the number that it must have counted to.
        """
        self._hear()
        for rank, (key, number) in came.items():
            if rank in self._left and self._left[rank].get(key, 0) < number:
                self._mourns = True
                self._tell(rank, MOURNED, {})
                raise PeerError(f"rank {rank} has ended, and this rank waits for it in {what}")

    def leave(self) -> None:
        """Ends MPI if all ranks leave, or lets this process go without if it has failed or is mourned."""
        if os.getpid() != self._process or self._has_left or self._mpi.Is_finalized():
            return
        self._has_left = True
        if self._mourns and pending_exit_code() is None:
            time.sleep(GRACE_S)
        if self._mourns or is_known_to_fail() or hasattr(sys, "last_type"):  # an exception that nobody has caught
            return
        for rank in range(self._communicator.size):
            if rank != self._communicator.rank:
                self._tell(rank, LEFT, self._counts)
        if self._all_leave():
            self._mpi.Finalize()
            if skips_exit_handlers():
                end_for_mpiexec()
        elif not pending_exit_code():
            write_stderr(f"samestep: rank {self._communicator.rank} has ended while others waited for it\n")
            os._exit(1)  # mpiexec would take a 0 for the whole job's

    def _all_leave(self) -> bool:
        """Waits until all leave; false if somebody mourns this rank."""
        together = self._communicator.Ibarrier()
        while not together.Test():
            self._hear()
            if self._mourned:
                return False
            time.sleep(LOOK_S)
        return True

    def _tell(self, rank: int, tag: int, what: Mapping[str, int]) -> None:
        text = json.dumps(dict(what)).encode()
        self._sent.append((self._communicator.Isend([text, self._mpi.BYTE], rank, tag), text))

    def _hear(self) -> None:
        """Takes in what others have said."""
        status = self._mpi.Status()
        while (message := self._communicator.Improbe(status=status)) is not None:
            text = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([text, self._mpi.BYTE])
            if status.tag == LEFT:
                self._left[status.source] = json.loads(text)
            else:
                self._mourned = True


def _note_exit() -> None:
    """Notes the exit code of `sys.exit`: python tells it to nobody."""
    leave = sys.exit

    @functools.wraps(leave)
    def noting(code: Any = None, /) -> NoReturn:
        set_exit_code(code if isinstance(code, int) else int(code is not None))
        leave(code)

    sys.exit = noting


@functools.cache
def ending_of(mpi: Any) -> Ending:
    """Returns the process's ending, made when the first group is. Collective then."""
    ending = Ending(mpi)
    atexit.register(ending.leave)
    _note_exit()
    return ending
