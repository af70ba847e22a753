"""Tensors of which every rank holds a part (DTensor: FSDP2, tensor parallelism): who holds what, and who wants what.

    rank 0   [0 1 2]  ──►  tensors.safetensors         ┐  ┌──►  rank 0   [0 1]
    rank 1   [3 4]    ──►  tensors-00001.safetensors   ┴──┼──►  rank 1   [2 3]       each reads the pieces of its own
                                                          └──►  rank 2   [4]

The planner of torch's distributed checkpoint, which knows every placement and mesh, says which box of the whole a rank
holds, and which pieces of the saved boxes it needs. Nothing is gathered, on the way out or in. A plain tensor wanted
where a cut one was saved is put together from its parts, and cut ones are read out of a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.checkpoints.grid import Box
from samestep.checkpoints.manifest import MAPPINGS, Manifest, Placeholder, decode
from samestep.errors import CheckpointError


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor; where torch.distributed.tensor was never imported, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_boxes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Box, Tensor]]:
    """Returns what this rank holds of DTensors: name -> where it lies in the whole, and the part.

    Collective where one is a sum that has not been made yet (Partial), over its mesh.
    """
    if not tensors:
        return {}
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: _reduced(tensor) for name, tensor in tensors.items()})
    found = {}
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        chunk, part = item.tensor_data.chunk, planner.resolve_data(item)
        assert isinstance(part, Tensor)
        if part.numel():
            found[item.index.fqn] = (Box(tuple(chunk.offsets), tuple(chunk.sizes)), part)
    return found


def _reduced(tensor: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    whole: Tensor = tensor.redistribute(placements=placements) if placements != list(tensor.placements) else tensor
    return whole


# --- what is wanted cut -------------------------------------------------------------------------------------


def target_shardings(
    manifest: Manifest, named: Mapping[str, Any], content_of: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """Returns which tensors of a checkpoint are to be cut as which DTensor of the objects that will take them.

    `content_of` returns the present state of an object that is no optimizer. One tensor that is wanted in two ways is
    an error.
    """
    found: dict[str, Any] = {}
    if "torch.distributed.tensor" not in sys.modules:
        return found
    placeholders = {name: Placeholder(name) for name in manifest.tensors}
    for key in manifest.state.keys() & named.keys():
        saved = decode(manifest.state[key], placeholders)
        thing = named[key]
        pairs = _of_optimizer(saved, thing) if isinstance(thing, Optimizer) else _pairs(saved, content_of(thing))
        for placeholder, target in pairs:
            if not is_sharded(target) or list(target.shape) != manifest.tensors[placeholder.name]["shape"]:
                continue
            here: Any = target
            other: Any = found.setdefault(placeholder.name, here)
            if (other.device_mesh, other.placements) != (here.device_mesh, here.placements):
                raise CheckpointError(
                    f"{placeholder.name} is one tensor in the checkpoint (tied), and {key} cuts it as "
                    f"{other.placements} in one place and as {here.placements} in another; tie them here too"
                )
    return found


def _of_optimizer(saved: Any, optimizer: Optimizer) -> Iterator[tuple[Placeholder, Tensor]]:
    """State of a parameter's shape is cut as the parameter is; the rest, such as a count of steps, is every rank's."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        owners = dict(zip(numbers, parameters, strict=False))
        for number, entries in saved["state"].items():
            for value in entries.values():
                if isinstance(value, Placeholder) and number in owners:
                    yield value, owners[number]
    except (LookupError, TypeError, AttributeError):
        return  # no state of an optimizer, which is told in words when it is compared


def _pairs(saved: Any, present: Any) -> Iterator[tuple[Placeholder, Tensor]]:
    """Every tensor of a saved state, with the tensor of the present one that says how it is cut."""
    if isinstance(saved, Placeholder):
        if isinstance(present, Tensor):
            yield saved, present
    elif type(saved) in MAPPINGS and isinstance(present, Mapping):
        for key in saved.keys() & present.keys():
            yield from _pairs(saved[key], present[key])
    elif isinstance(saved, list | tuple) and isinstance(present, list | tuple):
        for one, other in zip(saved, present, strict=False):
            yield from _pairs(one, other)
