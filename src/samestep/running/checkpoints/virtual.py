"""What virtual ranks keep beside the state of the named objects: how many they are, and the buffers of every slice.

A run goes on bit for bit only with what shapes its sums, so that is saved too:

    buffers    model -> name -> [virtual ranks, …]      those that slices have changed: BatchNorm's statistics
    ranks      a run goes on with as many, or its slices would be others
    threads    of the CPU; others add up in another order

On another number of ranks each takes the rows of the slices that it holds now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samestep.errors import CheckpointError
from samestep.launch.warning import warn
from samestep.replicas.replicate import Replica
from samestep.replicas.virtual_engine import VirtualRankEngine
from samestep.runtime.world import World

__all__: list[str] = []


def gather(world: World, named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what belongs into a checkpoint; nothing without virtual ranks. Collective: every rank must call it."""
    if world.virtual is None:
        return {}
    buffers = {name: engine.buffers.state() for name, engine in _engines(named).items()}
    return {"virtual": {"ranks": world.virtual.count, "threads": torch.get_num_threads(), "buffers": buffers}}


def check(random: Mapping[str, Any] | None, world: World) -> bool:
    """Returns whether the checkpoint is of virtual ranks and this world has them too.

    Raises:
        CheckpointError: there were more or fewer.
    """
    saved = None if random is None else random.get("virtual")  # a converted checkpoint has no streams
    mine = None if world.virtual is None else world.virtual.count
    if saved is None or mine is None:
        if (saved is None) != (mine is None) and random is not None:
            was = "none" if saved is None else saved["ranks"]
            warn(
                f"the run was saved with virtual_ranks {was} and goes on with {mine or 'none'}: from here on it is "
                "another training in its last bits",
            )
        return False
    if saved["ranks"] != mine:
        raise CheckpointError(
            f"the run was saved with virtual_ranks={saved['ranks']}, and this world has {mine}: its "
            "steps would be cut into other slices, and not go on bit for bit. Give world(virtual_ranks="
            f"{saved['ranks']}), or start anew in another directory"
        )
    if saved["threads"] != torch.get_num_threads():
        warn(
            f"the run was saved with {saved['threads']} CPU threads a rank, this one has {torch.get_num_threads()}: "
            "the last bits may differ from here on",
        )
    return True


def restore(random: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Gives every slice its buffers back, after the models' own state."""
    buffers = random["virtual"]["buffers"]
    for name, engine in _engines(named).items():
        engine.buffers.load_state(buffers.get(name, {}))


def _engines(named: Mapping[str, Any]) -> dict[str, VirtualRankEngine]:
    found = {name: thing.slices for name, thing in named.items() if isinstance(thing, Replica)}
    return {name: engine for name, engine in found.items() if engine is not None}
