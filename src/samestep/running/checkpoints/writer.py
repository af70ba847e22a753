"""Writes a checkpoint so that it is either there, whole, or not there at all.

    [1] a fresh hidden folder      [2] payload, synced      [3] manifest with the payload's digest, synced
    [4] the folder, synced         [5] one rename: from here on the checkpoint exists         [6] its name, synced

Killed before [5], the next start sweeps the folder away; after [5] everything the name promises is on the disk.
`torch.save` over the previous file loses both when it is killed, and reports a full disk as "unexpected pos 704
vs 598" (measured on torch 2.13).
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.running.checkpoints.directory import Directory, reason, sync_folder
from samestep.running.checkpoints.format import MANIFEST, PAYLOAD, Manifest, to_text
from samestep.running.checkpoints.payload import measure

__all__ = ["write"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


def write(directory: Directory, manifest: Manifest, tensors: dict[str, Tensor]) -> Path:
    """Writes ``tensors`` and ``manifest`` (its tables of tensors and files are filled in here) into ``directory``.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the disk is full or refuses; what was there before is untouched.
    """
    name = directory.fresh_name(manifest.step)
    manifest = replace(manifest, tensors={key: describe(tensor) for key, tensor in tensors.items()})
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + 2 * len(to_text(manifest))
    try:
        _require_space(directory.path, needed)
        return _write_folder(directory, name, manifest, tensors)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save {directory.path / name}: {_why(error, directory.path, needed)}") from error


def _write_folder(directory: Directory, name: str, manifest: Manifest, tensors: dict[str, Tensor]) -> Path:
    directory.belong_to(manifest.run)
    folder = directory.temporary(name)  # [1]
    final = directory.path / name
    try:
        _write_payload(folder / PAYLOAD, tensors)
        files, places = measure(folder)
        _write_text(folder / MANIFEST, to_text(replace(manifest, files=files, places=places)))
        sync_folder(folder)  # [4]
        folder.rename(final)  # [5]
        sync_folder(directory.path)  # [6]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the error on its way says more than one of the clean-up
        raise
    return final


def _write_payload(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: flat(tensor) for name, tensor in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # [2]


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="ascii") as file:
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


def _require_space(path: Path, needed: int) -> None:
    if shutil.disk_usage(path).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device")


def _why(error: Exception, path: Path, needed: int) -> str:
    # safetensors passes the system's words on, not its number.
    if getattr(error, "errno", None) in _FULL or any(f"os error {code}" in str(error) for code in _FULL):
        free = shutil.disk_usage(path).free
        return f"disk full at {path}: needs {_megabytes(needed)}, free {_megabytes(free)}"
    return reason(error) if isinstance(error, OSError) else str(error)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
