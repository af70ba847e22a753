"""Weights that several layers share, also from stage to stage: one weight, of which each layer has a copy.

    tokens.weight  ─ stage 0      gradient a ┐
                                             ├─ a + b, in the order of the layers, for both copies: they step alike,
    head.weight    ─ stage 1      gradient b ┘  and stay equal to the last bit

One process has the same copies, so that its bits are those of every cut. In a state they are one weight under all its
names; an optimizer's state, and a norm, know the first name alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.runtime.axis import Axis

__all__: list[str] = []

_TAG = 1 << 20  # of gradients of copies; those of activations are smaller
Layers = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Tie:
    """One weight of several layers.

    Attributes:
        name: under which the model has it first.
        names: under which each of them has it, in their order.
        layers: their numbers.
    """

    name: str
    names: tuple[str, ...]
    layers: tuple[int, ...]


class Held(NamedTuple):
    """A parameter where a layer has it."""

    layer: int
    name: str
    owner: nn.Module
    attribute: str


def ties_of(model: nn.Module, layers: Layers) -> list[Tie]:
    """Returns the weights that layers share and could have copies of: each in a module, and under a name, of its own.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> model[2].weight = model[0].weight
    >>> ties_of(model, list(model.named_children()))
    [Tie(name='0.weight', names=('0.weight', '2.weight'), layers=(0, 2))]
    """
    order = {name: place for place, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return [
        Tie(
            min((one.name for one in held), key=order.__getitem__),
            tuple(one.name for one in held),
            tuple(one.layer for one in held),
        )
        for held in _shared(model, layers)
    ]


def parted(model: nn.Module, layers: Layers) -> list[Tie]:
    """Gives layers copies of what they share, all but the one with the first name; returns what was, or is, shared."""
    ties = ties_of(model, layers)
    for tie, held in zip(ties, _shared(model, layers), strict=True):
        weight = origin(getattr(held[0].owner, held[0].attribute))
        for one in held:
            if one.name != tie.name and getattr(one.owner, one.attribute) is weight:
                copy = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
                copy.samestep_copy_of = weight  # type: ignore[attr-defined]
                setattr(one.owner, one.attribute, copy)
    return ties


def origin(parameter: nn.Parameter) -> nn.Parameter:
    """Returns what a parameter is a copy of; itself, if of nothing."""
    found: nn.Parameter = getattr(parameter, "samestep_copy_of", parameter)
    return found


def _shared(model: nn.Module, layers: Layers) -> list[list[Held]]:
    held: defaultdict[int, list[Held]] = defaultdict(list)
    for one, parameter in parameters_of(layers):
        held[id(origin(parameter))].append(one)
    own = {id(module) for module in model.modules()}

    def apart(all_: list[Held]) -> bool:
        owners = {id(one.owner) for one in all_}
        alone = len(all_) == len({one.name for one in all_}) == len({one.layer for one in all_}) == len(owners)
        return len(all_) > 1 and alone and owners <= own

    return [all_ for all_ in held.values() if apart(all_)]


def parameters_of(layers: Layers) -> Iterator[tuple[Held, nn.Parameter]]:
    """Yields the parameters of layers, and where each of them has it, under the model's names."""
    for number, (name, layer) in enumerate(layers):
        prefix = "" if getattr(layer, "named_in_full", False) else f"{name}."
        for path, module in layer.named_modules(prefix=prefix, remove_duplicate=False):
            for attribute, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None:
                    place = ".".join(each for each in (path.strip("."), attribute) if each)
                    yield Held(number, place, module, attribute), parameter


class Copies:
    """The copies on all ranks of a pipeline, whose gradients are added up when a step ends.

    Args:
        ties: the same on all ranks.
        ranks: by layer, the position of its rank on the pipeline.
        own: this rank's parameters, by name.
        axis: the pipeline.
    """

    def __init__(self, ties: Sequence[Tie], ranks: Sequence[int], own: dict[str, nn.Parameter], axis: Axis) -> None:
        self._axis = axis
        self._places = [
            [(name, ranks[layer]) for name, layer in zip(tie.names, tie.layers, strict=True)] for tie in ties
        ]
        self._own = own
        self.aliases = {name: tie.name for tie in ties for name in tie.names if name != tie.name}
        names = {name for tie in ties for name in tie.names}
        self.parameters = [each for name, each in own.items() if name in names]

    def add_up(self) -> None:
        """Gives all copies of a weight the sum of their gradients. Collective over the ranks that have some."""
        tag = _TAG
        for places in self._places:
            mine = [name for name, rank in places if rank == self._axis.rank]
            if mine and self._own[mine[0]].requires_grad:  # as all copies, on all ranks (see rollcall)
                self._add_up(tag, places, mine)
            tag += len(places)

    def _add_up(self, first: int, places: list[tuple[str, int]], mine: list[str]) -> None:
        parameters = {name: self._own[name] for name in mine}
        gradients: dict[str, Tensor] = {
            name: torch.zeros_like(each) if each.grad is None else each.grad.contiguous()
            for name, each in parameters.items()
        }
        works: list[Any] = []
        for tag, (name, rank) in enumerate(places, first):
            if rank == self._axis.rank:
                others = {other for _, other in places if other != rank}
                works += [self._send(gradients[name], other, tag) for other in sorted(others)]
            else:
                gradients[name] = torch.empty_like(parameters[mine[0]])
                works.append(self._receive(gradients[name], rank, tag))
        for work in works:
            work.wait()
        sum_ = gradients[places[0][0]].clone()
        for name, _ in places[1:]:
            sum_ += gradients[name].to(sum_.device)
        for parameter in parameters.values():
            parameter.grad = sum_.to(parameter.device, copy=True)

    def _send(self, tensor: Tensor, rank: int, tag: int) -> Any:
        return dist.isend(tensor, self._axis.ranks[rank], group=self._axis.group, tag=tag)

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Any:
        return dist.irecv(tensor, self._axis.ranks[rank], group=self._axis.group, tag=tag)
