"""Writes a checkpoint so that it is either there, whole, or not there at all; beside the training where asked.

    [1] a fresh hidden folder      [2] payloads, hashed in memory, synced      [3] manifest with the digests, synced
    [4] the folder, synced         [5] one rename: from here on the checkpoint exists         [6] its name, synced

Each rank that holds parts of tensors writes a payload of its own; all else is done by the first alone, when all have
reported what they wrote. Killed before [5], the next start removes the folder; after [5] everything the name promises
is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep import events
from samestep.checkpoints.directory import CheckpointDirectory, os_error_text, sync_folder, write_synced
from samestep.checkpoints.grid import file_of
from samestep.checkpoints.integrity import write_payload
from samestep.checkpoints.manifest import MANIFEST, Manifest, to_text
from samestep.errors import CheckpointError
from samestep.runtime.digest import bytes_of
from samestep.text import bytes_text

THREAD = "samestep-checkpoint"  # the name of the thread that writes
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class RemoteWriters:
    """The ranks that write files of their own into an unfinished checkpoint that the first has made.

    `collect` waits for what :func:`write_shard` returns on each of them, and returns it by rank.
    """

    folder: Path  # the unfinished checkpoint
    collect: Callable[[], dict[int, dict[str, Any]]]


def write(
    directory: CheckpointDirectory,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    remote: RemoteWriters | None = None,
) -> Path:
    """Writes ``tensors`` of this rank and ``manifest`` into ``directory``; returns the new checkpoint's folder.

    The manifest's digests are filled in here, and its table of tensors unless other ranks (`remote`) write, too. If the
    disk is full or refuses, here or on another rank, what was there before is untouched.
    """
    manifest = replace(manifest, tensors=manifest.tensors or {key: tensor_entry(one) for key, one in tensors.items()})
    remote = remote or RemoteWriters(begin_folder(directory, manifest, tensors), dict)
    final = directory.path / directory.final_name(remote.folder)
    try:
        return _write_folder(final, manifest, tensors, remote)
    except OSError as error:
        raise CheckpointError(f"cannot save {final}: {_error_text(error, directory.path, _size(tensors))}") from error


def begin_folder(directory: CheckpointDirectory, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Path:
    """Makes the folder in which a checkpoint is put together, if there is room for it and for what the first writes."""
    name = directory.fresh_name(manifest.step)
    needed = _size(tensors) + 2 * len(to_text(manifest))
    try:
        _require_space(directory.path, needed)
        directory.set_run_id(manifest.run)
        return directory.temporary(name)  # [1]
    except OSError as error:
        text = _error_text(error, directory.path, needed)
        raise CheckpointError(f"cannot save {directory.path / name}: {text}") from error


def write_shard(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes what another rank than the first has of a checkpoint; returns what the first is told of it."""
    try:
        if not folder.is_dir():
            return {"error": f"{folder} is not visible here; all ranks need one and the same directory"}
        return {"digests": _write_payload(folder, rank, tensors)}
    except Exception as error:  # noqa: BLE001  (reported to the first rank, which raises it)
        return {"error": _error_text(error, folder.parent, _size(tensors))}


def _write_folder(final: Path, manifest: Manifest, tensors: Mapping[str, Tensor], remote: RemoteWriters) -> Path:
    folder = remote.folder
    reports: dict[int, dict[str, Any]] = {}
    try:
        try:
            digests = _write_payload(folder, 0, tensors)
        finally:
            reports = remote.collect()  # in any case: nobody writes any more into a folder that is removed
        complete = _with_digests(manifest, {0: {"digests": digests}, **reports}, final)
        write_synced(folder / MANIFEST, to_text(complete))  # [3]
        sync_folder(folder)  # [4]
        folder.rename(final)  # [5]
        sync_folder(final.parent)  # [6]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the error on its way says more than one of the clean-up
        raise
    return final


def _with_digests(manifest: Manifest, reports: Mapping[int, dict[str, Any]], final: Path) -> Manifest:
    for rank, report in reports.items():
        if "error" in report:
            raise CheckpointError(f"cannot save {final}: rank {rank}: {report['error']}")
    tensors = {}
    for name, entry in manifest.tensors.items():
        ranks = manifest.parts[name]["ranks"] if name in manifest.parts else [0]
        tensors[name] = {**entry, "sha256": [reports[rank]["digests"][name] for rank in ranks]}
    return replace(manifest, tensors=tensors)


def _write_payload(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Writes the file of a rank, if there is room for it, and returns the digests of the tensors in it."""
    _require_space(folder.parent, _size(tensors))
    # as they are stored: on the CPU, their elements one after another
    stored = {name: one.detach().resolve_conj().resolve_neg().cpu().contiguous() for name, one in tensors.items()}
    data = {name: bytes_of(tensor).numpy().data for name, tensor in stored.items()}
    return write_payload(folder / file_of(rank), {name: tensor_entry(one) for name, one in tensors.items()}, data)


def tensor_entry(tensor: Tensor) -> dict[str, Any]:
    """Returns the manifest's entry for a tensor, without its digests."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _require_space(path: Path, needed: int) -> None:
    if shutil.disk_usage(path).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device")


def _error_text(error: Exception, path: Path, needed: int) -> str:
    if isinstance(error, OSError) and error.errno in _FULL:
        free = shutil.disk_usage(path).free
        return f"disk full at {path}: needs {bytes_text(needed)}, free {bytes_text(free)}"
    if isinstance(error, OSError):
        return os_error_text(error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {str(error)[:200]}"


# --- beside the training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveResult:
    """What became of a write: the folder, or why there is none."""

    step: int
    folder: Path | None
    error: Exception | None


class AsyncWriter:
    """Writes on a thread of its own, one checkpoint at a time.

    The training waits for a copy into host buffers of our own, which the next save uses again, and for the write before
    this one: a slow disk holds the training up, and memory does not grow. The thread is not a daemon, so a process that
    ends waits for its last checkpoint.
    """

    def __init__(self) -> None:
        self.write_seconds: deque[float] = deque(maxlen=5)  # of the last writes, whether they failed or not
        self._future: Future[SaveResult] | None = None
        self._job: Callable[[], SaveResult]
        self._thread: threading.Thread
        self._buffers: dict[str, Tensor] = {}

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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

        def job() -> SaveResult:
            began = time.monotonic()
            try:
                result = SaveResult(step, write(), None)
            except Exception as error:  # noqa: BLE001  (kept for whoever asks next)
                result = SaveResult(step, None, error)
            self.write_seconds.append(time.monotonic() - began)
            _note_event(result, began, self.write_seconds[-1])
            return result

        self._future, self._job = Future(), job
        self._thread = threading.Thread(target=_run, args=(self._future, job), name=THREAD)
        self._thread.start()  # an interrupt may come here, before or after the thread begins to run

    def poll(self) -> SaveResult | None:
        """Returns what became of the write that has ended since the last call, if one has."""
        return self.wait() if self._future is not None and self._future.done() else None

    def wait(self) -> SaveResult | None:
        """Waits for the write under way, and returns what became of it; None where there is none."""
        if self._future is None:
            return None
        if self._future.cancel():  # the thread has not begun it, and may never: an interrupt kept it from starting
            result = self._job()
        else:
            result = self._future.result()
            self._thread.join()
        self._future = None
        return result


def _run(future: Future[SaveResult], job: Callable[[], SaveResult]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(job())


def _note_event(result: SaveResult, began: float, seconds: float) -> None:
    folder, size = result.folder, 0
    if folder is not None:
        with contextlib.suppress(OSError):  # a newer one has replaced it
            size = sum(file.stat().st_size for file in folder.iterdir())
    reason = None if result.error is None else str(result.error)
    path = "" if folder is None else str(folder)
    events.note("checkpoint", result.step, began, seconds=round(seconds, 6), path=path, bytes=size, reason=reason)
