"""DataLoader's workers, watched: which one died, of what, and over which samples.

When a worker dies, torch raises from a signal handler wherever the rank's main thread happens to be, mostly in the
middle of a backward, and one that leaves with exit code 0 is noticed after five seconds. Here the rank checks when it
asks for a batch and twice a second while it waits, and the status that workers write says which sample it was.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

from samestep.data.order import Order
from samestep.errors import DataError, SamestepError
from samestep.launch.rank.failure import signal_name

_CHECK_INTERVAL_S = 0.5  # how often a rank that waits checks its workers

_HINTS: dict[int, str] = {
    signal.SIGKILL: "the kernel does that when memory runs out: take fewer workers or smaller batches",
    signal.SIGBUS: "that happens when /dev/shm is full: take fewer workers or smaller batches, or enlarge it",
    signal.SIGSEGV: "native code of the dataset failed: workers=0 and faulthandler show where",
}


class WorkerStatus:
    """What every worker does, in memory shared with the rank, which reads it when a worker has died.

    A row is [first position of the micro-batch, one past its last, place in it of the sample that is being loaded].
    The place is -1 where all are loaded at once, and the number of samples when they are made into a batch.
    """

    def __init__(self, workers: int) -> None:
        self._shared = torch.full((workers, 3), -1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self._shared.numpy()  # a write takes 0.1 us, to a tensor 3
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {"_shared": self._shared}  # for a worker that is spawned: the view would be copied

    def write(self, worker: int, start: int, stop: int, place: int = -1) -> None:
        self._rows[worker] = (start, stop, place)

    def write_place(self, worker: int, place: int) -> None:
        self._rows[worker, 2] = place

    def clear(self, worker: int) -> None:
        self.write(worker, -1, -1)

    def read(self, worker: int) -> tuple[int, int, int]:
        start, stop, place = self._rows[worker].tolist()
        return start, stop, place


def initialise_worker(worker: int) -> None:  # noqa: ARG001  (torch passes it)
    """Runs first in a worker.

    A worker outlives the signal with which a scheduler asks every process of a job to make room: torch lets SIGTERM
    end it, and the rank with it, before the rank could save. From its own rank it accepts the signal, as torch's
    workers do: multiprocessing waits at exit for the processes that it has terminated.
    """
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # the user's, as expected
    numbers = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    threading.Thread(target=_wait_for_signals, args=(numbers, os.getppid()), daemon=True).start()


def _wait_for_signals(numbers: set[signal.Signals], rank: int) -> None:
    """Ends this process at a SIGTERM of the rank's; Python's handlers are not told who sent a signal."""
    while True:
        info = signal.sigwaitinfo(numbers)
        if info.si_signo == signal.SIGTERM and info.si_pid == rank:
            os._exit(0)


def batches_of(loader: DataLoader[Any], order: Order, status: WorkerStatus | None) -> Iterator[Any]:
    """Yields what the loader loads; an error of ours from a worker loses the worker's traceback, not its line."""
    iterator: Any = iter(loader)
    try:
        if status is not None:
            # torch's handler of SIGCHLD forgets these workers, so that it raises nothing in mid-backward
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # noqa: SLF001
            iterator._worker_pids_set = False  # noqa: SLF001
            iterator._try_get_data = _checking_get(weakref.ref(iterator), order, status)  # noqa: SLF001
        yield from iterator
    except SamestepError as error:
        text = str(error)
        if not text.startswith("Caught "):
            raise
        line = text.strip().splitlines()[-1].partition(": ")[2]
        # its own traceback, torch's, refers to itself and would keep the workers; the worker's is its text
        raise type(error)(line) from error.with_traceback(None)
    finally:
        if loader.num_workers:  # an error that is kept keeps its frames, and these their workers
            iterator._shutdown_workers()  # noqa: SLF001


def _checking_get(reference: weakref.ref[Any], order: Order, status: WorkerStatus) -> Callable[..., tuple[bool, Any]]:
    """Replaces the method that waits for a batch, which the iterator calls until it has one, by one that checks.

    It refers to the iterator weakly: a cycle would keep the workers of an abandoned loop until the next collection.
    """

    def try_get_data(timeout: float = _CHECK_INTERVAL_S) -> tuple[bool, Any]:  # noqa: ARG001  (torch's is 5 seconds)
        iterator = reference()
        assert iterator is not None
        try:
            found: tuple[bool, Any] = type(iterator)._try_get_data(iterator, _CHECK_INTERVAL_S)  # noqa: SLF001
        except Exception:  # torch has seen a dead one; or what it had sent died with it, and a connection was reset
            death = _find_death(iterator._workers, order, status)  # noqa: SLF001
            if death is None:
                raise
        else:
            return found
        raise DataError(death)

    return try_get_data


def _find_death(processes: list[Any], order: Order, status: WorkerStatus) -> str | None:
    """Says which worker has died, or dies within a moment: its connections close before it can be waited for."""
    ended = wait([process.sentinel for process in processes], timeout=_CHECK_INTERVAL_S)
    for worker, process in enumerate(processes):
        if process.sentinel in ended:
            process.join()
            pid, code, activity = process.pid, process.exitcode, _activity(order, status.read(worker))
            if code >= 0:
                return f"worker {worker} (process {pid}) left with exit code {code} {activity}; workers=0 shows where"
            hint = f"; {_HINTS[-code]}" if -code in _HINTS else ""
            return f"worker {worker} (process {pid}) was killed by {signal_name(-code)} {activity}{hint}"
    return None


def _activity(order: Order, row: tuple[int, int, int]) -> str:
    start, stop, place = row
    if start < 0:
        return "while it had nothing to load"
    indices = order.take(start, stop).tolist()
    if place == len(indices):
        return f"while it made a batch of samples {shortened(indices)}"
    if place < 0:
        return f"while it loaded micro-batch {shortened(indices)}"
    return f"while it loaded sample {indices[place]} of micro-batch {shortened(indices)}"


def shortened(indices: list[int], most: int = 16) -> str:
    """Returns a list of samples for an error message.

    >>> shortened([1, 2, 3], most=2)
    '[1, 2, … 3 in all]'
    """
    if len(indices) <= most:
        return str(indices)
    return f"{str(indices[:most])[:-1]}, … {len(indices)} in all]"
