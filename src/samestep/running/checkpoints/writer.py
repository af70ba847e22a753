"""Writes a checkpoint so that it is either there, whole, or not there at all.

    [1] a fresh hidden folder      [2] payloads, synced     [3] manifest with the payloads' digests, synced
    [4] the folder, synced         [5] one rename: from here on the checkpoint exists         [6] its name, synced

Each rank that holds parts of tensors writes a payload of its own; all else is done by the first alone, when all have
told it what they wrote. Killed before [5], the next start sweeps the folder away; after [5] everything the name
promises is on the disk.
`torch.save` over the previous file loses both when it is killed, and reports a full disk as "unexpected pos 704
vs 598" (measured on torch 2.13).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.running.checkpoints.directory import Directory, reason, sync_folder
from samestep.running.checkpoints.format import MANIFEST, PAYLOAD, Manifest, to_text
from samestep.running.checkpoints.grid import file_of
from samestep.running.checkpoints.payload import measure
from samestep.text import bytes_text

__all__ = ["write"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Others:
    """The ranks that write files of their own into a folder which the first has made.

    Attributes:
        folder: the unfinished checkpoint.
        letters: waits for what :func:`write_share` returns on each of them, and returns it by rank.
    """

    folder: Path
    letters: Callable[[], dict[int, dict[str, Any]]]


def write(
    directory: Directory, manifest: Manifest, tensors: Mapping[str, Tensor], others: Others | None = None
) -> Path:
    """Writes ``tensors`` and ``manifest`` (its tables of files and places are filled in here) into ``directory``.

    Args:
        directory: of the run.
        manifest: its table of tensors may be empty where nobody else writes.
        tensors: what this rank writes of them.
        others: who writes the rest; nobody by default.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the disk is full or refuses, here or on another rank; what was there before is untouched.
    """
    manifest = replace(manifest, tensors=manifest.tensors or {key: describe(one) for key, one in tensors.items()})
    others = others or Others(start(directory, manifest, tensors), dict)
    final = directory.path / directory.final_name(others.folder)
    try:
        return _write_folder(final, manifest, tensors, others)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save {final}: {_why(error, directory.path, _bytes_of(tensors))}") from error


def start(directory: Directory, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Path:
    """Makes the folder in which a checkpoint is put together, if there is room for it and for what the first writes."""
    name = directory.fresh_name(manifest.step)
    needed = _bytes_of(tensors) + 2 * len(to_text(manifest))
    try:
        _require_space(directory.path, needed)
        directory.belong_to(manifest.run)
        return directory.temporary(name)  # [1]
    except OSError as error:
        raise CheckpointError(f"cannot save {directory.path / name}: {_why(error, directory.path, needed)}") from error


def write_share(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes what another rank than the first has of a checkpoint; returns what the first is told of it."""
    needed = _bytes_of(tensors)
    try:
        if not folder.is_dir():
            return {"error": f"{folder} is not visible here; all ranks need one and the same directory"}
        _require_space(folder.parent, needed)
        file, places = _write_payload(folder, file_of(rank), tensors)
    except Exception as error:  # noqa: BLE001  (told to the first rank, which raises it)
        return {"error": _why(error, folder.parent, needed)}
    return {"file": file, "places": places}


def _write_folder(final: Path, manifest: Manifest, tensors: Mapping[str, Tensor], others: Others) -> Path:
    folder = others.folder
    told: dict[int, dict[str, Any]] = {}
    try:
        try:
            _require_space(final.parent, _bytes_of(tensors))
            file, places = _write_payload(folder, PAYLOAD, tensors)
        finally:
            told = others.letters()  # in any case: nobody writes any more into a folder that is removed
        complete = _complete(manifest, {0: {"file": file, "places": places}, **told}, final)
        _write_text(folder / MANIFEST, to_text(complete))
        sync_folder(folder)  # [4]
        folder.rename(final)  # [5]
        sync_folder(final.parent)  # [6]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the error on its way says more than one of the clean-up
        raise
    return final


def _complete(manifest: Manifest, told: Mapping[int, dict[str, Any]], final: Path) -> Manifest:
    """The manifest with what all ranks tell of their files."""
    for rank, letter in told.items():
        if "error" in letter:
            raise CheckpointError(f"cannot save {final}: rank {rank}: {letter['error']}")
    places = {
        name: [told[rank]["places"][name] for rank in manifest.parts[name]["ranks"]]
        if name in manifest.parts
        else told[0]["places"][name]
        for name in manifest.tensors
    }
    return replace(manifest, files={file_of(rank): letter["file"] for rank, letter in told.items()}, places=places)


def _write_payload(
    folder: Path, name: str, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Writes one file, and returns what :func:`measure` finds in it."""
    save_file({key: flat(tensor) for key, tensor in tensors.items()}, folder / name)
    with (folder / name).open("rb") as file:
        os.fsync(file.fileno())  # [2]
    return measure(folder, name)


def _write_text(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # [3]


def flat(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` as safetensors can store it: on the CPU, contiguous, alone in its storage."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.dtype == torch.complex128:  # safetensors has no such type: stored as pairs of float64
        tensor = torch.view_as_real(tensor)
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def describe(tensor: Tensor) -> dict[str, Any]:
    """Returns the manifest's entry for a tensor."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _require_space(path: Path, needed: int) -> None:
    if shutil.disk_usage(path).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device")


def _why(error: Exception, path: Path, needed: int) -> str:
    # safetensors passes the system's words on, not its number.
    if getattr(error, "errno", None) in _FULL or any(f"os error {code}" in str(error) for code in _FULL):
        free = shutil.disk_usage(path).free
        return f"disk full at {path}: needs {bytes_text(needed)}, free {bytes_text(free)}"
    if isinstance(error, OSError):
        return reason(error)
    known = isinstance(error, SafetensorError | CheckpointError)
    return str(error) if known else f"{type(error).__name__}: {str(error)[:200]}"
