"""Tensors of which every rank holds a part (DTensor: FSDP2, tensor parallelism), saved whole and dealt out anew.

torch's distributed checkpoint writes every rank's part into a file of its own, and the directory can then be read by
torch.distributed alone. Here a tensor is whole in the checkpoint, whoever held which part of it: so it loads on any
number of ranks, into any other sharding and into a plain model, and the digest of its bytes does not depend on either.

    rank 0   [0 1 2]  ┐  one tensor after the other          ┌  rank 0   [0 1]
    rank 1   [3 4]    ┘  gathered: rank 0 keeps [0 1 2 3 4]  ├  rank 1   [2 3]      each takes its own of what it reads
                                                             └  rank 2   [4]

The price is that rank 0 has the whole state in its host memory, and every rank one whole tensor at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.running.checkpoints.named import State, Stateful
from samestep.running.checkpoints.tree import MAPPINGS
from samestep.runtime.world import World

__all__: list[str] = []


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor; where torch.distributed.tensor was never imported, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def whole(state: State, world: World) -> State:
    """Returns a state whose sharded tensors are whole, on the first rank. Collective where it has any.

    The other ranks have nothing in their places, which is enough for those who do not write.
    """
    if not _any_sharded(state.content):
        return state

    def gathered(tensor: Any) -> Tensor:
        full: Tensor = tensor.full_tensor().detach()
        return full.cpu() if world.is_first else full.new_empty(0, device="cpu")

    return replace(state, content=_mapped(state.content, gathered))


def dealt_out(thing: Stateful, state: State) -> State:
    """Returns a saved state with each tensor cut as `thing` holds it; a plain `thing` takes whole ones."""
    if isinstance(thing, nn.Module) and _any_sharded(present := thing.state_dict()):
        return replace(state, content={name: _cut(value, present.get(name)) for name, value in state.content.items()})
    if isinstance(thing, Optimizer):
        parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
        if any(map(is_sharded, parameters)):
            return replace(state, content=_for_optimizer(state.content, parameters))
    return state


def _for_optimizer(content: dict[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """State of a parameter's shape is cut as the parameter is; the rest, such as a count of steps, is every rank's."""
    numbers = [number for group in content["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))
    states = {
        number: {name: _cut(value, owners.get(number)) for name, value in entries.items()}
        for number, entries in content["state"].items()
    }
    return {**content, "state": states}


def _cut(value: Any, as_in: Any) -> Any:
    if not isinstance(value, Tensor) or not is_sharded(as_in) or value.shape != as_in.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # no rank sends: all have read the same bytes
    return distribute_tensor(value.to(as_in.device), as_in.device_mesh, as_in.placements, src_data_rank=None)


def _any_sharded(value: Any) -> bool:
    if type(value) in MAPPINGS:
        return any(map(_any_sharded, value.values()))
    return any(map(_any_sharded, value)) if type(value) in {list, tuple} else is_sharded(value)


def _mapped(value: Any, change: Callable[[Any], Tensor]) -> Any:
    if type(value) in MAPPINGS:
        return type(value)({key: _mapped(item, change) for key, item in value.items()})
    if type(value) in {list, tuple}:
        return type(value)(_mapped(item, change) for item in value)
    return change(value) if is_sharded(value) else value
