"""Models in stages, saved as the whole that they are parts of: each rank gives its part, each takes its part back.

    rank 0: stage 0      0.weight  0.bias               ┐                      ┌  the same model, cut anywhere else,
    rank 1: stage 1      3.weight  3.bias               ├─▶  one checkpoint  ──┤  or not cut at all
    optimizer of each    exp_avg of its own, numbered   ┘                      └

An optimizer numbers the parameters that it was given, so the numbers of a stage's say nothing: in the checkpoint they
are those of one optimizer that has the whole model's, in the model's order, group by group. The first rank writes, and
needs memory on the host for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.errors import CheckpointError
from samestep.pipelines.pipeline import Pipeline
from samestep.running.checkpoints.named import State
from samestep.runtime.exchange import all_gather_json

__all__: list[str] = []


@dataclass(frozen=True)
class _Steered:
    """An optimizer over the parameters of a pipeline.

    Attributes:
        own: by group, the names of those that it has here, copies of shared weights as well.
        whole: by group, of those that it has on all stages, in the model's order.
    """

    pipeline: Pipeline
    own: list[list[str]]
    whole: list[list[str]]


class Stages:
    """What of the named objects is in stages. Collective: every rank must make it.

    Raises:
        CheckpointError: an optimizer has other groups on another stage.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._pipelines = {name: thing for name, thing in named.items() if isinstance(thing, Pipeline)}
        optimizers = {name: thing for name, thing in named.items() if isinstance(thing, Optimizer)}
        self._optimizers: dict[str, _Steered] = {}
        if self._pipelines and optimizers:
            own = {name: self._steered(thing) for name, thing in optimizers.items()}
            axis = next(iter(self._pipelines.values())).world.pipeline
            for told in all_gather_json(axis, own):  # a stage may have no parameter of an optimizer that another has
                own |= {name: of for name, of in told.items() if of is not None}
            for name, of in own.items():
                if of is not None:
                    self._optimizers[name] = _laid_out(name, optimizers[name], self._pipelines[of])

    def _steered(self, optimizer: Optimizer) -> str | None:
        """Returns the name of the pipeline some of whose parameters here an optimizer has."""
        given = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for name, pipeline in self._pipelines.items():
            if given & {id(each) for each in pipeline.parameters()}:
                return name
        return None

    def whole(self, name: str, state: State) -> State:
        """Returns the state of a named object for the whole model. Collective."""
        if name in self._pipelines:
            return replace(state, content=self._pipelines[name].whole_state_dict())
        if name in self._optimizers:
            return _gathered(state, self._optimizers[name])
        return state

    def expected(self, name: str, state: State) -> State:
        """Returns what a saved state is compared with: the form of the whole."""
        if name in self._pipelines:
            return replace(state, content=self._pipelines[name].whole.state | state.content)
        if name in self._optimizers:
            return replace(state, about=_about(state, self._optimizers[name]))
        return state

    def own(self, name: str, state: State) -> State:
        """Returns of a saved state what this rank's object takes."""
        return _cut(state, self._optimizers[name]) if name in self._optimizers else state


def gather(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns where the random numbers of the pipelines' layers stand; nothing without pipelines."""
    found = {name: thing.draws.state() for name, thing in named.items() if isinstance(thing, Pipeline)}
    return {"pipelines": found} if found else {}


def restore(random: Mapping[str, Any] | None, named: Mapping[str, Any]) -> None:
    """Lets them go on from there; those of a model that was saved in one piece begin."""
    saved = {} if random is None else random.get("pipelines", {})
    for name, thing in named.items():
        if isinstance(thing, Pipeline) and name in saved:
            thing.draws.load(saved[name])


def _laid_out(name: str, optimizer: Optimizer, pipeline: Pipeline) -> _Steered:
    names = {id(each): key for key, each in pipeline.named_parameters()} | {id(pipeline.nothing): "(nothing)"}
    own = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
    told = all_gather_json(pipeline.world.pipeline, own)
    if len({len(groups) for groups in told}) > 1:
        raise CheckpointError(
            f"{name} has {' and '.join(str(len(groups)) for groups in told)} groups of parameters on the stages: give "
            "it the same on each"
        )
    if any("" in group for groups in told for group in groups):
        raise CheckpointError(f"{name} steers parameters of the pipeline and others: give each an optimizer of its own")
    order = {key: place for place, key in enumerate(pipeline.whole.parameters)}
    whole = [
        sorted({key for group in groups for key in group if key in order}, key=order.__getitem__)
        for groups in zip(*told, strict=True)
    ]
    return _Steered(pipeline, own, whole)


def _about(state: State, steered: _Steered) -> dict[str, Any]:
    shapes = [[steered.pipeline.whole.parameters[key] for key in group] for group in steered.whole]
    return {**state.about, "shapes": shapes}


def _numbers(groups: list[list[str]]) -> dict[str, int]:
    """Returns the number of each parameter, as an optimizer counts them."""
    return {key: number for number, key in enumerate(key for group in groups for key in group)}


def _gathered(state: State, steered: _Steered) -> State:
    """Puts the states of the stages' optimizers together. Collective over the pipeline."""
    own, numbers = _numbers(steered.own), _numbers(steered.whole)
    entries = {
        key: state.content["state"].get(number, {})
        for key, number in own.items()
        if key not in steered.pipeline.aliases
    }
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for key, entry in entries.items():
        tensors |= {f"{key}/{name}": value for name, value in entry.items() if isinstance(value, Tensor)}
        plain[key] = {name: value for name, value in entry.items() if not isinstance(value, Tensor)}
    found = steered.pipeline.gathered(tensors)
    told: dict[str, dict[str, Any]] = {}
    for each in all_gather_json(steered.pipeline.world.pipeline, plain):
        told |= each
    for place, value in found.items():
        key, _, name = place.rpartition("/")
        told[key][name] = value
    groups = [
        {**group, "params": [numbers[key] for key in keys]}
        for group, keys in zip(state.content["param_groups"], steered.whole, strict=True)
    ]
    merged = {numbers[key]: entry for key, entry in told.items() if entry}
    content = {**state.content, "state": dict(sorted(merged.items())), "param_groups": groups}
    return State(_about(state, steered), content)


def _cut(state: State, steered: _Steered) -> State:
    """Takes this stage's part out of the state of the whole model's optimizer."""
    saved = [number for group in state.content["param_groups"] for number in group["params"]]
    names = [key for group in steered.whole for key in group]
    entries = {key: state.content["state"].get(number) for key, number in zip(names, saved, strict=True)}
    own, aliases = _numbers(steered.own), steered.pipeline.aliases
    groups = [
        {**group, "params": [own[key] for key in keys]}
        for group, keys in zip(state.content["param_groups"], steered.own, strict=True)
    ]
    mine = {}
    for key, number in own.items():
        entry = entries.get(aliases.get(key, key))
        if entry is not None:  # one of its own for each copy: optimizers change them in place
            mine[number] = {name: each.clone() if isinstance(each, Tensor) else each for name, each in entry.items()}
    return replace(state, content={**state.content, "state": mine, "param_groups": groups})
