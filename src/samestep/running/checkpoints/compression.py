"""The error-feedback residuals of all ranks, kept beside the state of the models that it belongs to.

A run that loses it loses up to a step's gradients with strong compression, and does not go on bit for bit. It is every
rank's own, so a save gathers it:

    compression    model -> declared, steps, and for each rank [elements] with the places of its pieces

Of a model in stages it is a replica's, of all its stages together, so that it fits another cut.

On as many ranks each takes its own; on another number it is shared out (:mod:`samestep.compress.folding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samestep.compress.memory import State
from samestep.errors import CheckpointError
from samestep.launch.warning import warn
from samestep.pipelines.pipeline import Pipeline
from samestep.replicas.compression import GradientCompression
from samestep.replicas.replicate import Replica
from samestep.runtime.exchange import all_gather_json, all_gather_tensors
from samestep.runtime.world import World

__all__: list[str] = []


def gather(world: World, named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what belongs into a checkpoint; nothing without compression. Collective: every rank must call it."""
    found = {name: _gathered(world, named[name], one) for name, one in _compressions(named).items()}
    return {"compression": found} if found else {}


def _gathered(world: World, model: Replica | Pipeline, compression: GradientCompression) -> dict[str, Any]:
    state = compression.state()
    parts = [(kind, name, part) for kind, pieces in state["owed"].items() for name, part in pieces.items()]
    flat = torch.cat([part for _, _, part in parts]) if parts else torch.zeros(0)
    places = [[kind, name, part.numel()] for kind, name, part in parts]
    if isinstance(model, Pipeline):  # of all stages of a replica together, whatever its next cut is
        places = [place for stage in all_gather_json(world.pipeline, places) for place in stage]
        flat = torch.cat(all_gather_tensors(world.pipeline, flat))
    return {
        "declared": state["declared"],
        "steps": state["steps"],
        "places": all_gather_json(world.data, places),
        "owed": all_gather_tensors(world.data, flat),
    }


def check(random: Mapping[str, Any] | None, world: World, named: Mapping[str, Any]) -> None:
    """Refuses what was saved with another codec, and says what is not as it was.

    Raises:
        CheckpointError: the codec, or a setting of it, is another.
    """
    saved = {} if random is None else random.get("compression", {})
    present = _compressions(named)
    for name, compression in present.items():
        if name not in saved:
            continue
        was, now = saved[name]["declared"], compression.codec.declared()
        if was != now:
            raise CheckpointError(
                f"{name} was saved with compress={_spelled(was)}, and is now compressed by {_spelled(now)}, which "
                "cannot use the error-feedback residuals: give the codec that was used, save once with compress=None "
                "to drop them, or take another directory"
            )
        ranks = len(saved[name]["owed"])
        if ranks != world.data.size:
            warn(
                f"{name} was saved by {ranks} ranks and resumes with {world.data.size}: the error-feedback residuals "
                f"({was['codec']}) are divided evenly, so the resumed run is not the same bit for bit"
            )
    for name in saved.keys() - present.keys() & named.keys():
        what = _spelled(saved[name]["declared"])
        warn(f"{name} was saved with compress={what} and resumes without: the error-feedback residuals are dropped")


def restore(random: Mapping[str, Any] | None, world: World, named: Mapping[str, Any]) -> None:
    """Gives every rank back what it owes."""
    saved = {} if random is None else random.get("compression", {})
    for name, compression in _compressions(named).items():
        if name in saved:
            states = [_state(*each) for each in zip(saved[name]["places"], saved[name]["owed"], strict=True)]
            mine = compression.own(states, world.data)
            compression.load(saved[name]["steps"], mine)


def _state(places: list[list[Any]], flat: torch.Tensor) -> State:
    state: State = {}
    parts = flat.split_with_sizes([length for _, _, length in places])
    for (kind, name, _), part in zip(places, parts, strict=True):
        state.setdefault(kind, {})[name] = part
    return state


def _spelled(declared: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={value!r}" for key, value in declared.items() if key != "codec")
    return f"{declared['codec']}({settings})"


def _compressions(named: Mapping[str, Any]) -> dict[str, GradientCompression]:
    """Returns those at work: one rank owes nobody."""
    models = {
        name: thing
        for name, thing in named.items()
        if isinstance(thing, Replica | Pipeline) and thing.world.data.size > 1
    }
    return {name: one.compression for name, one in models.items() if one.compression is not None}
