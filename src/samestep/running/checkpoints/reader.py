"""Reads a checkpoint only after every byte of it has proved to be the byte that was saved.

PyTorch's readers check no digests: one flipped bit, or 4 KiB of zeros where a disk lost power, loads without a
word (measured on torch 2.13, for `torch.save` and for the distributed checkpoint). Here a checkpoint is either
what was written or it is quarantined, named, and the one before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.running.checkpoints import identity
from samestep.running.checkpoints.directory import Directory
from samestep.running.checkpoints.format import PAYLOAD, Manifest
from samestep.running.checkpoints.grid import Cell, cells, file_of
from samestep.running.checkpoints.integrity import DamageError, read_manifest, verify
from samestep.running.checkpoints.layout import payloads
from samestep.running.checkpoints.payload import check_header
from samestep.running.checkpoints.sharded import filled
from samestep.running.checkpoints.writer import describe

__all__ = ["newest_good", "read_manifest", "read_tensors", "verify"]

_LOG = logging.getLogger("samestep.checkpoint")


def newest_good(directory: Directory) -> str | None:
    """Returns the name of the newest checkpoint that proves intact; sets aside the ones that do not, or are foreign.

    Each quarantined one is reported by one warning of the logger ``samestep.checkpoint`` (on standard error unless
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
        _LOG.warning("%s is not used, and quarantined as %s: %s", directory.path / name, damaged[-1], problem)
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {directory.path} can be trusted, {len(damaged)} quarantined ({', '.join(damaged)}); "
            "restore one from a copy, or start again to begin from nothing"
        )
    return None


def read_tensors(folder: Path, manifest: Manifest, moulds: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint in memory of their own: whole and on the CPU, but for those of `moulds`.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        moulds: name -> DTensor. Of such a tensor only this rank's part is read, to the device where the mould's lies.

    Raises:
        CheckpointError: a payload does not hold what the manifest lists.
    """
    moulds = moulds or {}
    with _Opened(folder, manifest) as opened:
        dtypes = {name: _dtype(manifest.tensors[name]) for name in moulds}
        cut = filled(moulds, dtypes, {name: opened.cells(name) for name in moulds}, opened.box)
        return {name: cut[name] if name in cut else opened.whole(name) for name in manifest.tensors}


class _Opened(ExitStack):
    """The payloads of a checkpoint; each is checked and opened when the first tensor of it is read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__()
        self._folder = folder
        self._manifest = manifest
        self._payloads = payloads(manifest)
        self._files: dict[str, Any] = {}
        check_header(folder, self._payloads[PAYLOAD])

    def cells(self, name: str) -> list[Cell]:
        """Returns the boxes in which a tensor lies: that of the whole, where it is not in parts."""
        if name in self._manifest.parts:
            return cells(self._manifest.parts[name])
        shape = self._manifest.tensors[name]["shape"]
        return [Cell((0,) * len(shape), tuple(shape))]

    def whole(self, name: str) -> Tensor:
        """Returns a whole tensor, put together where it is in parts."""
        entry = self._manifest.tensors[name]
        if name not in self._manifest.parts:
            # safetensors maps the file into memory; a copy does not depend on the file any more.
            tensor = self._piece(name, 0, entry, None).clone()
        else:
            tensor = torch.empty(entry["shape"], dtype=_dtype(entry))
            for number, cell in enumerate(self.cells(name)):
                place = _slices(cell)
                tensor[place] = self._piece(name, number, {**entry, "shape": list(cell.shape)}, None)
        return tensor

    def box(self, name: str, number: int, box: Cell) -> Tensor:
        """Returns a box of a cell, mapped from the file."""
        entry = {**self._manifest.tensors[name], "shape": list(box.shape)}
        return self._piece(name, number, entry, box)

    def _piece(self, name: str, number: int, expected: dict[str, Any], box: Cell | None) -> Tensor:
        grid = self._manifest.parts.get(name)
        file = file_of(0 if grid is None else grid["ranks"][number])
        try:
            opened = self._file(file)
            if box is None or not box.shape:
                tensor: Tensor = opened.get_tensor(name)
            else:
                tensor = opened.get_slice(name)[_slices(box)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._folder / file} cannot be read: {error}") from error
        if expected["dtype"] == "complex128":
            tensor = torch.view_as_complex(tensor.clone())
        if describe(tensor) != expected:
            raise CheckpointError(f"{file} holds {name} as {describe(tensor)}, the manifest says {expected}")
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._files:
            check_header(self._folder, self._payloads[name])
            self._files[name] = self.enter_context(safe_open(self._folder / name, framework="pt", device="cpu"))
        return self._files[name]


def _slices(box: Cell) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(box.offset, box.shape, strict=True))


def _dtype(entry: Mapping[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return dtype
