"""The part of an object's state that every rank has of its own: gathered into the one checkpoint, handed back to each.

torch's distributed checkpoint saves a plain Python object of each rank under a key that the script must make unique.
Here an object says which entry of its state is its rank's own (`per_rank`; a stateful loader's position, say). Each
rank's goes into the checkpoint as the JSON tree and the tensors that it would be by itself:

    rank 0   {"steps": 3, "loader": a}              {"steps": 3, "loader": {"trees": [a, b], "tensors": [bytes, bytes]}}
    rank 1   {"steps": 3, "loader": b}    saved as   read on two ranks: a and b again; on any other number: None
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.running.checkpoints.format import Encoder, decode
from samestep.running.checkpoints.named import State
from samestep.runtime.exchange import all_gather_json, all_gather_tensors, raise_on_all_ranks
from samestep.runtime.world import World

__all__: list[str] = []


def gathered(thing: Any, state: State, world: World) -> State:
    """Returns the state of `thing` with every rank's own entry in it. Collective where it has one.

    Raises:
        CheckpointError: the entry is no plain data.
        PeerError: that of another rank is not.
    """
    key = getattr(thing, "per_rank", None)
    if key is None:
        return state
    tree, data, problem = None, b"", None
    try:
        encoder = Encoder()
        tree = encoder.encode(state.content[key], key)
        data = to_bytes({name: _alone(tensor) for name, tensor in encoder.plain().items()})
    except Exception as error:  # noqa: BLE001  (agree raises it, here and on every other rank)
        problem = error
    raise_on_all_ranks(world.everyone, problem)
    every = {
        "trees": all_gather_json(world.everyone, tree),
        "tensors": all_gather_tensors(world.everyone, torch.frombuffer(bytearray(data), dtype=torch.uint8)),
    }
    return State({**state.about, "per_rank": key}, {**state.content, key: every})


def _alone(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU whose elements lie one after another, as safetensors takes it."""
    if tensor.dtype == torch.complex128:  # which it does not have
        raise CheckpointError("a loader's state holds a complex128 tensor: keep it as view_as_real(…) or complex64")
    return tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)


def own(state: State, world: World) -> State:
    """Returns the state as this rank's object takes it: with the entry that was its own, or None in another world."""
    key = state.about.get("per_rank")
    if key is None:
        return state
    every, mine = state.content[key], None
    if len(every["trees"]) == world.size:
        mine = decode(every["trees"][world.rank], from_bytes(bytes(every["tensors"][world.rank].tolist())))
    return replace(state, content={**state.content, key: mine})
