"""Models in stages, saved as the whole that they are parts of: each rank gives its part, each takes its part back.

    rank 0: stage 0      0.weight  0.bias               ┐                      ┌  the same model, cut anywhere else,
    rank 1: stage 1      3.weight  3.bias               ├─▶  one checkpoint  ──┤  or not cut at all
    optimizer of each    exp_avg of its own, numbered   ┘                      └

An optimizer numbers the parameters that it was given. In the checkpoint the numbers are those of one optimizer that has
the whole model's parameters, in the model's order, group by group. The first rank writes, and needs memory on the host
for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.checkpoints.state import ObjectState
from samestep.errors import CheckpointError
from samestep.pipelines.pipeline import Pipeline
from samestep.runtime.exchange import all_gather_json


class PipelineState:
    """What of the named objects is in stages. Collective: every rank must make it."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._pipelines = {name: thing for name, thing in named.items() if isinstance(thing, Pipeline)}
        optimizers = {name: thing for name, thing in named.items() if isinstance(thing, Optimizer)}
        self._optimizers: dict[str, _PipelineOptimizer] = {}
        if self._pipelines and optimizers:
            pipeline_of = {name: self._pipeline_of(thing) for name, thing in optimizers.items()}
            axis = next(iter(self._pipelines.values())).world.pipeline
            for stage in all_gather_json(axis, pipeline_of):  # on some stage an optimizer may have no parameter
                pipeline_of |= {name: of for name, of in stage.items() if of is not None}
            for name, of in pipeline_of.items():
                if of is not None:
                    self._optimizers[name] = _parameter_names(name, optimizers[name], self._pipelines[of])

    def _pipeline_of(self, optimizer: Optimizer) -> str | None:
        """The name of the pipeline some of whose parameters here an optimizer has."""
        given = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for name, pipeline in self._pipelines.items():
            if given & {id(each) for each in pipeline.parameters()}:
                return name
        return None

    def full(self, name: str, state: ObjectState) -> ObjectState:
        """Returns the state of a named object for the whole model. Collective."""
        if name in self._pipelines:
            return replace(state, content=self._pipelines[name].whole_state_dict())
        if name in self._optimizers:
            return _gather(state, self._optimizers[name])
        return state

    def expected(self, name: str, state: ObjectState) -> ObjectState:
        """Returns what a saved state is compared with: the form of the whole."""
        if name in self._pipelines:
            return replace(state, content=self._pipelines[name].full_model.state | state.content)
        if name in self._optimizers:
            return replace(state, about=_about(state, self._optimizers[name]))
        return state

    def local(self, name: str, state: ObjectState) -> ObjectState:
        """Returns of a saved state what this rank's object takes."""
        return _select(state, self._optimizers[name]) if name in self._optimizers else state


@dataclass(frozen=True)
class _PipelineOptimizer:
    pipeline: Pipeline
    local: list[list[str]]  # by group, the names of those that it has here, copies of shared weights as well
    full: list[list[str]]  # by group, of those that it has on all stages, in the model's order


def _parameter_names(name: str, optimizer: Optimizer, pipeline: Pipeline) -> _PipelineOptimizer:
    names = {id(each): key for key, each in pipeline.named_parameters()} | {id(pipeline.placeholder): "(nothing)"}
    local = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
    stages = all_gather_json(pipeline.world.pipeline, local)
    if len({len(groups) for groups in stages}) > 1:
        raise CheckpointError(
            f"{name} has {' and '.join(str(len(groups)) for groups in stages)} groups of parameters on the stages: "
            "give it the same on each"
        )
    if any("" in group for groups in stages for group in groups):
        raise CheckpointError(f"{name} steers parameters of the pipeline and others: give each an optimizer of its own")
    order = {key: place for place, key in enumerate(pipeline.full_model.parameters)}
    full = [
        sorted({key for group in groups for key in group if key in order}, key=order.__getitem__)
        for groups in zip(*stages, strict=True)
    ]
    return _PipelineOptimizer(pipeline, local, full)


def _about(state: ObjectState, optimizer: _PipelineOptimizer) -> dict[str, Any]:
    shapes = [[optimizer.pipeline.full_model.parameters[key] for key in group] for group in optimizer.full]
    return {**state.about, "shapes": shapes}


def _numbers(groups: list[list[str]]) -> dict[str, int]:
    """The number of each parameter, as an optimizer counts them."""
    return {key: number for number, key in enumerate(key for group in groups for key in group)}


def _gather(state: ObjectState, optimizer: _PipelineOptimizer) -> ObjectState:
    """Puts the states of the stages' optimizers together. Collective over the pipeline."""
    pipeline, numbers = optimizer.pipeline, _numbers(optimizer.full)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for key, number in _numbers(optimizer.local).items():
        if key in pipeline.aliases:
            continue
        entry = state.content["state"].get(number, {})
        tensors |= {f"{key}/{name}": value for name, value in entry.items() if isinstance(value, Tensor)}
        plain[key] = {name: value for name, value in entry.items() if not isinstance(value, Tensor)}
    gathered = pipeline.gathered(tensors)
    entries: dict[str, dict[str, Any]] = {}
    for stage in all_gather_json(pipeline.world.pipeline, plain):
        entries |= stage
    for place, value in gathered.items():
        key, _, name = place.rpartition("/")
        entries[key][name] = value
    groups = [
        {**group, "params": [numbers[key] for key in keys]}
        for group, keys in zip(state.content["param_groups"], optimizer.full, strict=True)
    ]
    merged = {numbers[key]: entry for key, entry in entries.items() if entry}
    content = {**state.content, "state": dict(sorted(merged.items())), "param_groups": groups}
    return ObjectState(_about(state, optimizer), content)


def _select(state: ObjectState, optimizer: _PipelineOptimizer) -> ObjectState:
    """Takes this stage's part out of the state of the whole model's optimizer."""
    saved = [number for group in state.content["param_groups"] for number in group["params"]]
    names = [key for group in optimizer.full for key in group]
    entries = {key: state.content["state"].get(number) for key, number in zip(names, saved, strict=True)}
    numbers, aliases = _numbers(optimizer.local), optimizer.pipeline.aliases
    groups = [
        {**group, "params": [numbers[key] for key in keys]}
        for group, keys in zip(state.content["param_groups"], optimizer.local, strict=True)
    ]
    local = {}
    for key, number in numbers.items():
        entry = entries.get(aliases.get(key, key))
        if entry is not None:  # one of its own for each copy: optimizers change them in place
            local[number] = {name: each.clone() if isinstance(each, Tensor) else each for name, each in entry.items()}
    return replace(state, content={**state.content, "state": local, "param_groups": groups})
