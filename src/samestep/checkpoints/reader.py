"""Reads the tensors of a checkpoint that :func:`samestep.checkpoints.integrity.verify` has found intact."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samestep.checkpoints.grid import PAYLOAD, Box, boxes, file_of
from samestep.checkpoints.integrity import check_payload, payloads
from samestep.checkpoints.manifest import Manifest
from samestep.checkpoints.writer import tensor_entry
from samestep.errors import CheckpointError


def read_tensors(folder: Path, manifest: Manifest, targets: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint in memory of their own: whole and on the CPU, but for those of `targets`.

    Of those, DTensors by name, only this rank's part is read, to the device of the target.
    """
    targets = targets or {}
    with _OpenPayloads(folder, manifest) as opened:
        cut = _read_shards(opened, manifest, targets)
        return {name: cut[name] if name in cut else opened.whole(name) for name in manifest.tensors}


def _read_shards(opened: _OpenPayloads, manifest: Manifest, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns new DTensors, cut as `targets` are, which may be in use and are not touched. Not collective."""
    if not targets:
        return {}
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    dtypes = {name: _dtype(manifest.tensors[name]) for name in targets}
    made = {name: _empty(target, dtypes[name]) for name, target in targets.items()}
    listed = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtypes[name]),
            size=target.shape,
            chunks=[Chunk(torch.Size(box.offset), torch.Size(box.shape)) for box in opened.boxes(name)],
        )
        for name, target in targets.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(made), Metadata(state_dict_metadata=dict(listed)))
    for item in planner.create_local_plan().items:
        number = item.storage_index.index
        assert number is not None
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        planner.resolve_tensor(item).copy_(opened.part(item.storage_index.fqn, number, list(box.shape), box))
    return made


def _empty(target: Any, dtype: torch.dtype) -> Tensor:
    from torch.distributed.tensor import DTensor

    part = torch.empty_like(target.to_local(), dtype=dtype, requires_grad=False)
    return DTensor.from_local(
        part, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


class _OpenPayloads(ExitStack):
    """The payloads of a checkpoint; each is checked and opened when the first tensor of it is read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__()
        self._folder = folder
        self._manifest = manifest
        self._payloads = payloads(manifest)
        self._files: dict[str, Any] = {}
        self._file(PAYLOAD)

    def boxes(self, name: str) -> list[Box]:
        """Returns the boxes in which a tensor lies: that of the whole, where it is not in parts."""
        if name in self._manifest.parts:
            return boxes(self._manifest.parts[name])
        shape = self._manifest.tensors[name]["shape"]
        return [Box((0,) * len(shape), tuple(shape))]

    def whole(self, name: str) -> Tensor:
        entry = self._manifest.tensors[name]
        if name not in self._manifest.parts:
            # safetensors maps the file into memory; a copy does not depend on the file any more.
            return self.part(name, 0, entry["shape"]).clone()
        tensor = torch.empty(entry["shape"], dtype=_dtype(entry))
        for number, box in enumerate(self.boxes(name)):
            tensor[_slices(box)] = self.part(name, number, list(box.shape))
        return tensor

    def part(self, name: str, number: int, shape: list[int], box: Box | None = None) -> Tensor:
        """Returns a part of a tensor or a box of that part, mapped from the file."""
        grid = self._manifest.parts.get(name)
        file = file_of(0 if grid is None else grid["ranks"][number])
        opened = self._file(file)
        try:
            if box is None or not box.shape:
                tensor: Tensor = opened.get_tensor(name)
            else:
                tensor = opened.get_slice(name)[_slices(box)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._folder / file} cannot be read: {error}") from error
        dtype = self._manifest.tensors[name]["dtype"]
        if dtype == "complex128":  # stored as pairs of float64
            tensor = torch.view_as_complex(tensor.clone())
        if tensor_entry(tensor) != (expected := {"dtype": dtype, "shape": shape}):
            raise CheckpointError(f"{file} holds {name} as {tensor_entry(tensor)}, the manifest says {expected}")
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._files:
            try:
                check_payload(self._folder, name, self._payloads[name], digests=False)
                self._files[name] = self.enter_context(safe_open(self._folder / name, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._folder / name} cannot be read: {error}") from error
        return self._files[name]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(box.offset, box.shape, strict=True))


def _dtype(entry: Mapping[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return dtype
