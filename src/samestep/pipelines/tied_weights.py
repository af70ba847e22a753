"""Weights that several layers share, also in different stages: one weight, of which each layer has a copy.

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

from samestep.pipelines.chain_layer import ChainLayer
from samestep.runtime.axis import Axis
from samestep.runtime.device import message_device


@dataclass(frozen=True)
class TiedWeight:
    name: str  # under which the model has it first
    names: tuple[str, ...]  # under which each layer has it, in their order
    layers: tuple[int, ...]  # their numbers


class _Place(NamedTuple):
    layer: int
    name: str
    owner: nn.Module
    attribute: str


def find_tied(model: nn.Module, layers: Sequence[ChainLayer]) -> list[TiedWeight]:
    """Returns the weights that layers share and can have copies of: each in a module, and under a name, of its own.

    >>> from samestep.pipelines.model_chain import build_chain
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> model[2].weight = model[0].weight
    >>> find_tied(model, build_chain(model).layers)
    [TiedWeight(name='0.weight', names=('0.weight', '2.weight'), layers=(0, 2))]
    """
    order = {name: place for place, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return [
        TiedWeight(
            min((one.name for one in places), key=order.__getitem__),
            tuple(one.name for one in places),
            tuple(one.layer for one in places),
        )
        for places in _shared_places(model, layers)
    ]


def untie(model: nn.Module, layers: Sequence[ChainLayer]) -> list[TiedWeight]:
    """Gives layers copies of what they share, all but the one with the first name; returns what was, or is, shared."""
    tied = find_tied(model, layers)
    for one, places in zip(tied, _shared_places(model, layers), strict=True):
        weight = tied_source(getattr(places[0].owner, places[0].attribute))
        for place in places:
            if place.name != one.name and getattr(place.owner, place.attribute) is weight:
                copy = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
                copy.samestep_copy_of = weight  # type: ignore[attr-defined]  # so that a model can be cut again
                setattr(place.owner, place.attribute, copy)
    return tied


def tied_source(parameter: nn.Parameter) -> nn.Parameter:
    """Returns what a parameter is a copy of; itself, if of nothing."""
    found: nn.Parameter = getattr(parameter, "samestep_copy_of", parameter)
    return found


def _shared_places(model: nn.Module, layers: Sequence[ChainLayer]) -> list[list[_Place]]:
    by_weight: defaultdict[int, list[_Place]] = defaultdict(list)
    for place, parameter in parameter_places(layers):
        by_weight[id(tied_source(parameter))].append(place)
    modules = {id(module) for module in model.modules()}

    def can_be_copied(places: list[_Place]) -> bool:
        owners = {id(one.owner) for one in places}
        distinct = len(places) == len({one.name for one in places}) == len({one.layer for one in places}) == len(owners)
        return len(places) > 1 and distinct and owners <= modules

    return [places for places in by_weight.values() if can_be_copied(places)]


def parameter_places(layers: Sequence[ChainLayer]) -> Iterator[tuple[_Place, nn.Parameter]]:
    """Yields the parameters of layers, and where each of them has it, under the model's names."""
    for number, layer in enumerate(layers):
        for path, module in layer.home.named_modules(remove_duplicate=False):
            for attribute, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None:
                    yield _Place(number, f"{path}.{attribute}" if path else attribute, module, attribute), parameter


class TiedGradients:
    """The copies on all ranks of a pipeline, whose gradients are summed when a step ends."""

    def __init__(
        self, tied: Sequence[TiedWeight], ranks: Sequence[int], own: dict[str, nn.Parameter], axis: Axis
    ) -> None:
        self._axis = axis
        self._holders = [
            [(name, ranks[layer]) for name, layer in zip(one.names, one.layers, strict=True)] for one in tied
        ]
        self._own = own
        # name of a copy -> name of the weight that it is a copy of, on all ranks
        self.aliases = {name: one.name for one in tied for name in one.names if name != one.name}
        names = {name for one in tied for name in one.names}
        self.parameters = [each for name, each in own.items() if name in names]

    def sum_gradients(self) -> None:
        """Gives all copies of a weight the sum of their gradients. Collective over the ranks that have some."""
        for holders in self._holders:
            mine = {name: self._own[name] for name, rank in holders if rank == self._axis.rank}
            if any(each.requires_grad for each in mine.values()):  # as all copies, on all ranks (see batch_check)
                self._sum(holders, mine)

    def _sum(self, holders: list[tuple[str, int]], mine: dict[str, nn.Parameter]) -> None:
        like = next(iter(mine.values()))
        group, names = self._axis.group, self._axis.ranks
        place = message_device(like.device, group)
        gradients: dict[str, Tensor] = {
            name: (torch.zeros_like(each) if each.grad is None else each.grad.contiguous()).to(place)
            for name, each in mine.items()
        }
        works: list[Any] = []
        for name, rank in holders:  # in one order on all ranks: messages between two ranks match by it
            if rank == self._axis.rank:
                others = {other for _, other in holders if other != rank}
                works += [dist.isend(gradients[name], names[other], group=group) for other in sorted(others)]
            else:
                gradients[name] = torch.empty_like(like, device=place)
                works.append(dist.irecv(gradients[name], names[rank], group=group))
        for work in works:
            work.wait()
        total = gradients[holders[0][0]].clone()
        for name, _ in holders[1:]:
            total += gradients[name].to(total.device)
        for parameter in mine.values():
            parameter.grad = total.to(parameter.device, copy=True)
