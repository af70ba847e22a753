"""One write at a time beside the training, on a thread of each rank that writes.

    step k: due     copy the tensors into host buffers of our own ┐ the training waits for this alone
                    hand them to the thread ──────────────────────┘
    step k+1, …     the thread writes, hashes, syncs, renames, verifies, deletes old ones
    due again       waits first for the write before it: a slow disk holds the training up, and memory does not grow

The copy is whole before the optimizer changes the next weight; the buffers are used again by the next save. Writing,
hashing and syncing let go of the interpreter's lock. torch's own asynchronous save allocates anew each time, and loses
the last save of a script that ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from samestep import events

__all__: list[str] = []

THREAD = "samestep-checkpoint"  # the name of the one that writes


@dataclass(frozen=True)
class Outcome:
    """What became of a write: the folder, or why there is none."""

    step: int
    folder: Path | None
    error: Exception | None


class Background:
    """Writes on a thread of its own; not a daemon, so a process that ends waits for its last checkpoint.

    Attributes:
        took: seconds that the last writes took, whether they failed or not.
    """

    def __init__(self) -> None:
        self.took: deque[float] = deque(maxlen=5)
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._begin: Callable[[], None]
        self._buffers: dict[str, Tensor] = {}

    def hold(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of `tensors` in host memory that nobody else changes. No write may be under way."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[name].detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # a model on several GPUs copies on a stream of each
        return dict(self._buffers)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        held = self._buffers.get(name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            return held
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def start(self, step: int, write: Callable[[], Path]) -> None:
        """Begins to write the checkpoint of `step`. The one before it must have been waited for."""

        def run() -> None:
            began = time.monotonic()
            try:
                self._outcome = Outcome(step, write(), None)
            except Exception as error:  # noqa: BLE001  (kept for whoever asks next)
                self._outcome = Outcome(step, None, error)
            self.took.append(time.monotonic() - began)
            _note(self._outcome, began, self.took[-1])

        self._begin = partial(_first, deque([run]))
        self._thread = threading.Thread(target=self._begin, name=THREAD)
        self._thread.start()  # an interrupt may come in here, before or behind the moment from which it will run

    def poll(self) -> Outcome | None:
        """Returns what became of the write that has ended since the last call, if one has."""
        return self.wait() if self._thread is not None and not self._thread.is_alive() else None

    def wait(self) -> Outcome | None:
        """Waits for the write under way, and returns what became of it; None where there is none."""
        if self._thread is None:
            return None
        if not self._thread.is_alive():  # it has ended, or an interrupt kept it from running
            self._begin()
        if self._thread.is_alive():
            self._thread.join()
        self._thread, outcome, self._outcome = None, self._outcome, None
        return outcome


def _first(unbegun: deque[Callable[[], None]]) -> None:
    """Writes, if nobody has begun to: the thread, or else who waits for one that did not come to run."""
    try:
        write = unbegun.pop()
    except IndexError:  # the other one has
        return
    write()


def _note(outcome: Outcome, began: float, seconds: float) -> None:
    """Writes down among the run's events what became of a write."""
    folder, size = outcome.folder, 0
    if folder is not None:
        with contextlib.suppress(OSError):  # a newer one has replaced it
            size = sum(file.stat().st_size for file in folder.iterdir())
    reason = None if outcome.error is None else str(outcome.error)
    path = "" if folder is None else str(folder)
    events.note("checkpoint", outcome.step, began, seconds=round(seconds, 6), path=path, bytes=size, reason=reason)
