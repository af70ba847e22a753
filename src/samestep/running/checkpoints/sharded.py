"""Tensors of which every rank holds a part (DTensor: FSDP2, tensor parallelism): who holds what, and who wants what.

Which box of the whole a rank holds is the word of torch's distributed checkpoint, whose planner knows every placement
and mesh; so is which pieces of the saved cells a rank needs for the box that it wants. Its files and its metadata,
which are pickles without checksums, are not used. Nothing is gathered, on the way out or in:

    rank 0   [0 1 2]  ──►  tensors.safetensors         ┐  ┌──►  rank 0   [0 1]
    rank 1   [3 4]    ──►  tensors-00001.safetensors   ┴──┼──►  rank 1   [2 3]       each reads the pieces of its own
                                                          └──►  rank 2   [4]

A plain tensor wanted where a cut one was saved is put together from its cells, and cut ones are read out of a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.errors import CheckpointError
from samestep.running.checkpoints.grid import Cell
from samestep.running.checkpoints.manifest import Manifest
from samestep.running.checkpoints.named import state_of
from samestep.running.checkpoints.tree import MAPPINGS, decode

__all__: list[str] = []


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor; where torch.distributed.tensor was never imported, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def part_of(tensor: Any) -> Tensor:
    """Returns this rank's own part of a DTensor, which has no elements where it has none."""
    part: Tensor = tensor.to_local()
    return part


def local_boxes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Cell, Tensor]]:
    """Returns what this rank holds of DTensors: name -> where it lies in the whole, and the part.

    Collective where one is a sum that has not been made yet (Partial), over its mesh.
    """
    if not tensors:
        return {}
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: _summed(tensor) for name, tensor in tensors.items()})
    found = {}
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        chunk, part = item.tensor_data.chunk, planner.resolve_data(item)
        assert isinstance(part, Tensor)
        if part.numel():
            found[item.index.fqn] = (Cell(tuple(chunk.offsets), tuple(chunk.sizes)), part)
    return found


def _summed(tensor: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor  # type: ignore[no-any-return]
    whole: Tensor = tensor.redistribute(
        placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    )
    return whole


# --- what is wanted cut -----------------------------------------------------------------------------


class _Named:
    """Stands for a tensor of a checkpoint that has not been read yet."""

    def __init__(self, name: str) -> None:
        self.name = name

    def numpy(self) -> None:
        """An array is whole."""


def wanted(manifest: Manifest, named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns which tensors of a checkpoint are to be cut as which DTensor of the objects that will take them.

    Args:
        manifest: of the checkpoint.
        named: the objects.

    Raises:
        CheckpointError: one tensor of the checkpoint is wanted in two ways.
    """
    found: dict[str, Any] = {}
    if "torch.distributed.tensor" not in sys.modules:
        return found
    stand_ins = {name: _Named(name) for name in manifest.tensors}
    for key in manifest.state.keys() & named.keys():
        for saved, mould in _pairs(decode(manifest.state[key], stand_ins), named[key]):
            if not is_sharded(mould) or list(mould.shape) != manifest.tensors[saved.name]["shape"]:
                continue
            other: Any = found.setdefault(saved.name, mould)
            if (other.device_mesh, other.placements) != (mould.device_mesh, mould.placements):  # type: ignore[attr-defined]
                raise CheckpointError(
                    f"{saved.name} is one tensor in the checkpoint (tied), and {key} cuts it as {other.placements} in "
                    f"one place and as {mould.placements} in another; tie them here too"  # type: ignore[attr-defined]
                )
    return found


def _pairs(saved: Any, thing: Any) -> Iterator[tuple[_Named, Tensor]]:
    """Every tensor of a saved state, with the tensor of `thing` that says how it is cut."""
    if not isinstance(thing, Optimizer):
        yield from _alike(saved, state_of(thing).content)
        return
    # State of a parameter's shape is cut as the parameter is; the rest, such as a count of steps, is every rank's.
    parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
    try:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        owners = dict(zip(numbers, parameters, strict=False))
        for number, entries in saved["state"].items():
            for value in entries.values():
                if isinstance(value, _Named) and number in owners:
                    yield value, owners[number]
    except (LookupError, TypeError, AttributeError):
        return  # no state of an optimizer, which is told in words when it is compared


def _alike(saved: Any, present: Any) -> Iterator[tuple[_Named, Tensor]]:
    if isinstance(saved, _Named):
        if isinstance(present, Tensor):
            yield saved, present
    elif type(saved) in MAPPINGS and isinstance(present, Mapping):
        for key in saved.keys() & present.keys():
            yield from _alike(saved[key], present[key])
    elif isinstance(saved, list | tuple) and isinstance(present, list | tuple):
        for one, other in zip(saved, present, strict=False):
            yield from _alike(one, other)


# --- reading ----------------------------------------------------------------------------------------


def filled(
    moulds: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    cells: Mapping[str, list[Cell]],
    piece: Callable[[str, int, Cell], Tensor],
) -> dict[str, Tensor]:
    """Returns new DTensors, cut as `moulds` are, with what a checkpoint holds of this rank's parts. Not collective.

    Args:
        moulds: name -> a DTensor; may be a parameter in use, and is not touched.
        dtypes: name -> type of what is saved.
        cells: name -> how it lies there.
        piece: returns a box of a cell, from a name, the number of the cell, and where the box lies in it.
    """
    if not moulds:
        return {}
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    made = {name: _empty(mould, dtypes[name]) for name, mould in moulds.items()}
    listed = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtypes[name]),
            size=mould.shape,
            chunks=[Chunk(torch.Size(cell.offset), torch.Size(cell.shape)) for cell in cells[name]],
        )
        for name, mould in moulds.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(made), Metadata(state_dict_metadata=dict(listed)))
    for item in planner.create_local_plan().items:
        number = item.storage_index.index
        assert number is not None
        box = Cell(tuple(item.storage_offsets), tuple(item.lengths))
        planner.resolve_tensor(item).copy_(piece(item.storage_index.fqn, number, box))
    return made


def _empty(mould: Any, dtype: torch.dtype) -> Tensor:
    from torch.distributed.tensor import DTensor

    part = torch.empty_like(mould.to_local(), dtype=dtype, requires_grad=False)
    return DTensor.from_local(
        part, mould.device_mesh, mould.placements, run_check=False, shape=mould.shape, stride=mould.stride()
    )
