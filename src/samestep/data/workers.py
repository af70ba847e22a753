"""DataLoader's workers, watched: who died, of what, and over which samples.

When a worker dies, torch raises from a signal handler wherever the rank's main thread happens to be, mostly in the
middle of a backward: "DataLoader worker (pid 4242) is killed by signal: Killed". One that leaves with exit code 0 is
noticed after five seconds, and named by its process number. Here the rank looks by itself, when it asks for a batch and
twice a second while it waits, and the board on which workers write what they are at says the rest:

    worker 1 (process 4242) was killed by SIGKILL while it loaded sample 17 of micro-batch [3, 17, 4, 9]
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

from samestep.data.fetch import Board, shortened
from samestep.data.order import Positions
from samestep.errors import DataError, SamestepError
from samestep.launch.failure import signal_name

__all__: list[str] = []

_LOOK_S = 0.5  # how often a rank that waits looks at its workers

_HINTS: dict[int, str] = {
    signal.SIGKILL: "the kernel does that when memory runs out: take fewer workers or smaller batches",
    signal.SIGBUS: "that happens when /dev/shm is full: take fewer workers or smaller batches, or enlarge it",
    signal.SIGSEGV: "native code of the dataset failed: workers=0 and faulthandler show where",
}


def start(worker: int) -> None:  # noqa: ARG001  (what torch calls it with)
    """What a worker does first.

    It outlives the signal with which a scheduler asks every process of a job to make room: torch lets SIGTERM end it,
    and the rank with it, before the rank could save. Its own rank it obeys, as torch's workers do: multiprocessing
    waits at the exit for what it has told to end.
    """
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # the user's, as he expects
    numbers = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    threading.Thread(target=_obey, args=(numbers, os.getppid()), daemon=True).start()


def _obey(numbers: set[signal.Signals], rank: int) -> None:
    """Ends this process when the rank, and nobody else, tells it to; handlers of python's are not told who did."""
    while True:
        told = signal.sigwaitinfo(numbers)
        if told.si_signo == signal.SIGTERM and told.si_pid == rank:
            os._exit(0)


def batches_of(loader: DataLoader[Any], order: Positions, board: Board | None) -> Iterator[Any]:
    """Yields what the loader loads; an error of ours from a worker loses the worker's traceback, not its line."""
    iterator = iter(loader)
    try:
        if board is not None:
            _watch(iterator, order, board)
        yield from iterator
    except SamestepError as error:
        text = str(error)
        if not text.startswith("Caught "):
            raise
        line = text.strip().splitlines()[-1].partition(": ")[2]
        # its own traceback, torch's, makes a circle with itself and would keep the workers; the worker's is its text
        raise type(error)(line) from error.with_traceback(None)
    finally:
        if loader.num_workers:  # who keeps an error keeps its frames, and these their workers
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001


def _watch(iterator: Any, order: Positions, board: Board) -> None:
    """Replaces torch's look at its workers by ours.

    Torch's handler of SIGCHLD forgets these workers, so that it raises nothing in mid-backward; and the method that
    waits for a batch, which the iterator calls until it has one, waits less long and looks first. It knows the
    iterator weakly: a circle would keep the workers of a loop that was left until the next garbage collection.
    """
    signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # noqa: SLF001
    iterator._worker_pids_set = False  # noqa: SLF001
    iterator._try_get_data = _patience(weakref.ref(iterator), order, board)  # noqa: SLF001


def _patience(known: weakref.ref[Any], order: Positions, board: Board) -> Callable[..., tuple[bool, Any]]:
    def try_get_data(timeout: float = _LOOK_S) -> tuple[bool, Any]:  # noqa: ARG001  (torch's is five seconds)
        iterator = known()
        assert iterator is not None
        try:
            found: tuple[bool, Any] = type(iterator)._try_get_data(iterator, _LOOK_S)  # noqa: SLF001
        except Exception:  # torch has seen a dead one; or what it had sent died with it, and a connection was reset
            death = _death(iterator._workers, order, board)  # noqa: SLF001
            if death is None:
                raise
        else:
            return found
        raise DataError(death)

    return try_get_data


def _death(processes: list[Any], order: Positions, board: Board) -> str | None:
    """Says which worker has died, or dies within a moment: its connections close before it can be waited for."""
    ended = wait([process.sentinel for process in processes], timeout=_LOOK_S)
    for worker, process in enumerate(processes):
        if process.sentinel in ended:
            process.join()
            return _obituary(worker, process.pid, process.exitcode, _work(order, board.read(worker)))
    return None


def _obituary(worker: int, pid: int, code: int, work: str) -> str:
    if code >= 0:
        return f"worker {worker} (process {pid}) left with exit code {code} {work}; workers=0 shows where"
    hint = f"; {_HINTS[-code]}" if -code in _HINTS else ""
    return f"worker {worker} (process {pid}) was killed by {signal_name(-code)} {work}{hint}"


def _work(order: Positions, row: tuple[int, int, int]) -> str:
    """What a worker was at when it wrote a row of the board."""
    start, stop, place = row
    if start < 0:
        return "while it had nothing to load"
    indices = order.take(start, stop).tolist()
    if place == len(indices):
        return f"while it made a batch of samples {shortened(indices)}"
    if place < 0:
        return f"while it loaded micro-batch {shortened(indices)}"
    return f"while it loaded sample {indices[place]} of micro-batch {shortened(indices)}"
