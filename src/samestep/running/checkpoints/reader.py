"""Reads a checkpoint only after every byte of it has proved to be the byte that was saved.

PyTorch's readers check no digests: one flipped bit, or 4 KiB of zeros where a disk lost power, loads without a
word (measured on torch 2.13, for `torch.save` and for the distributed checkpoint). Here a checkpoint is either
what was written or it is set aside, named, and the one before it is used.
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.running.checkpoints.directory import Directory, reason
from samestep.running.checkpoints.format import MANIFEST, PAYLOAD, Manifest, from_text
from samestep.running.checkpoints.writer import describe, sha256_of

__all__ = ["newest_good", "read_manifest", "read_tensors", "verify"]

_LOG = logging.getLogger("samestep.checkpoint")
_LONGEST_MANIFEST = 256 * 2**20


def newest_good(directory: Directory) -> str | None:
    """Returns the name of the newest checkpoint that proves intact; sets aside the ones that do not.

    Each one set aside is reported by one warning of the logger ``samestep.checkpoint`` (on standard error unless
    the script configures logging).

    Raises:
        CheckpointError: there are checkpoints and none of them is intact, or one may not be read.
    """
    damaged = []
    for name in reversed(directory.names()):
        try:
            verify(directory.path / name)
        except CheckpointError as error:
            aside = directory.set_aside(name)
            damaged.append(aside)
            _LOG.warning("%s is not what was saved (%s); set aside as %s", directory.path / name, error, aside)
        else:
            return name
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {directory.path} can be trusted, {len(damaged)} set aside ({', '.join(damaged)}); "
            "restore one from a copy, or start again to begin from nothing"
        )
    return None


def verify(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint of which every byte is as it was written.

    Raises:
        CheckpointError: something is missing, altered, or not a checkpoint; says what.
    """
    manifest = read_manifest(folder)
    if not folder.name.startswith(f"step-{manifest.step:08d}"):
        raise CheckpointError(f"the folder is {folder.name}, its manifest is of step {manifest.step}")
    for name, expected in manifest.files.items():
        path = _plain_file(folder, name)
        if (size := path.stat().st_size) != expected["size"]:
            raise CheckpointError(f"{name} has {size} bytes instead of {expected['size']}")
        if (found := _digest(path)) != expected["sha256"]:
            raise CheckpointError(f"{name} has SHA-256 {found[:12]}… instead of {expected['sha256'][:12]}…")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest in ``folder``, its own digest checked.

    Raises:
        CheckpointError: it is missing, damaged, or of another schema.
    """
    path = _plain_file(folder, MANIFEST)
    if path.stat().st_size > _LONGEST_MANIFEST:
        raise CheckpointError(f"{MANIFEST} has {path.stat().st_size} bytes; none has more than {_LONGEST_MANIFEST}")
    try:
        return from_text(path.read_text(encoding="ascii"))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {reason(error)}") from error


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint on the CPU, in memory of their own.

    Raises:
        CheckpointError: the payload does not hold what the manifest lists.
    """
    tensors = {}
    try:
        with safe_open(_plain_file(folder, PAYLOAD), framework="pt", device="cpu") as payload:
            for name, expected in manifest.tensors.items():
                tensors[name] = _as_described(payload.get_tensor(name), expected, name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / PAYLOAD} cannot be read: {error}") from error
    return tensors


def _as_described(tensor: Tensor, expected: dict[str, object], name: str) -> Tensor:
    # safetensors maps the file into memory; a copy does not depend on the file any more.
    tensor = torch.view_as_complex(tensor.clone()) if expected["dtype"] == "complex128" else tensor.clone()
    if describe(tensor) != expected:
        raise CheckpointError(f"{PAYLOAD} holds {name} as {describe(tensor)}, the manifest says {expected}")
    return tensor


def _plain_file(folder: Path, name: str) -> Path:
    """Refuses names that lead out of the folder, and anything but a regular file."""
    if Path(name).name != name:
        raise CheckpointError(f"{name!r} is not a plain file name")
    path = folder / name
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} is missing") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{name} is not a regular file")
    return path


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {reason(error)}") from error
