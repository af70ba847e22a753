"""Reads a checkpoint only after every byte of it has proved to be the byte that was saved.

PyTorch's readers check no digests: one flipped bit, or 4 KiB of zeros where a disk lost power, loads without a
word (measured on torch 2.13, for `torch.save` and for the distributed checkpoint). Here a checkpoint is either
what was written or it is set aside, named, and the one before it is used.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.running.checkpoints import identity
from samestep.running.checkpoints.directory import Directory
from samestep.running.checkpoints.format import PAYLOAD, Manifest
from samestep.running.checkpoints.integrity import DamageError, read_manifest, verify
from samestep.running.checkpoints.payload import check_header
from samestep.running.checkpoints.writer import describe

__all__ = ["newest_good", "read_manifest", "read_tensors", "verify"]

_LOG = logging.getLogger("samestep.checkpoint")


def newest_good(directory: Directory) -> str | None:
    """Returns the name of the newest checkpoint that proves intact; sets aside the ones that do not, or are foreign.

    Each one set aside is reported by one warning of the logger ``samestep.checkpoint`` (on standard error unless
    the script configures logging).

    Raises:
        CheckpointError: there are checkpoints and none of them is intact, or one may not be read.
    """
    damaged = []
    for name in reversed(directory.names()):
        try:
            manifest = verify(directory.path / name)
            problem = identity.foreign(manifest.run, directory.path)
        except DamageError as error:
            problem = f"not what was saved: {error}"
        if problem is None:
            return name
        damaged.append(directory.set_aside(name))
        _LOG.warning("%s is not used, and set aside as %s: %s", directory.path / name, damaged[-1], problem)
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {directory.path} can be trusted, {len(damaged)} set aside ({', '.join(damaged)}); "
            "restore one from a copy, or start again to begin from nothing"
        )
    return None


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint on the CPU, in memory of their own.

    Raises:
        CheckpointError: the payload does not hold what the manifest lists.
    """
    tensors = {}
    check_header(folder, manifest)
    try:
        with safe_open(folder / PAYLOAD, framework="pt", device="cpu") as payload:
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
