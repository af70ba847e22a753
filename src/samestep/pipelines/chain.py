"""Models as chains of layers, and a stage's part of one: the same modules under their own names.

    Sequential(                     0                 layers, in the order in which they are called, by the names that
      0: Linear                     1.proj            their parameters have in the state_dict
      1: Sequential(                1.act
        proj: Linear                2
        act: ReLU)
      2: Linear)                    a part of [1, 3):   Sequential(1: Sequential(proj: Linear, act: ReLU))

Of any other model the forward is followed, and cut (see :mod:`samestep.pipelines.cutting`).

A part's state_dict has the keys of the whole model's, so the parts' together are the model's, and a checkpoint of one
is a checkpoint of the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.errors import ModelError, UsageError
from samestep.pipelines.cutting import Call, Recipe, Traced
from samestep.pipelines.given import Spread
from samestep.pipelines.ties import Tie, origin, parameters_of

__all__: list[str] = []


@dataclass(frozen=True)
class Whole:
    """What is known of a model on every rank that has a part of it.

    Attributes:
        state: name -> its entry in the state, without storage, in the model's order.
        parameters: name -> shape, likewise.
    """

    state: dict[str, Tensor]
    parameters: dict[str, list[int]]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Returns that of a model."""
        return cls(
            {name: each.detach().to("meta") for name, each in model.state_dict().items()},
            {name: list(each.shape) for name, each in model.named_parameters() if origin(each) is each},
        )


def unpacked(given: tuple[Tensor, ...]) -> Any:
    """As nn.Sequential hands it on: what one layer gives, a tensor or several in a tuple, is one argument."""
    return given[0] if len(given) == 1 else given


class Chain(Protocol):
    """A model as layers that are called one after another.

    Attributes:
        layers: their names and modules.
        recipe: how the model was cut, if that cannot be read off it.
        obstacles: to more layers, in words.
    """

    layers: list[tuple[str, nn.Module]]
    recipe: Recipe | None
    obstacles: list[str]

    def part(self, begin: int, end: int) -> tuple[nn.Module, list[Call]]:
        """Returns a module with what some layers have, under the model's names, and what computes each of them."""


def chain_of(model: nn.Module, sample: Sequence[Any] | None = None, recipe: Recipe | None = None) -> Chain:
    """Returns a model as a chain of layers.

    Args:
        model: an nn.Sequential, an nn.ModuleList of modules by hand, or any whose forward can be followed.
        sample: inputs of a micro-batch, to follow it with.
        recipe: of the same model, cut elsewhere; then without a sample.

    Raises:
        ModelError: its forward cannot be followed, or a layer cannot be in a pipeline.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> [name for name, _ in chain_of(model).layers]
        ['0', '1.0', '1.1']
    """
    if isinstance(model, nn.ModuleList):
        chain: Chain = Handmade(model)
    elif type(model) is nn.Sequential:
        chain = Listed(model)
    elif sample is None and recipe is None:
        raise ModelError(f"{type(model).__name__} is no nn.Sequential: samestep.plan_pipeline cuts it, with a sample")
    else:
        chain = Traced(model, sample, recipe)
    for name, layer in chain.layers:
        norm = next((inner for inner in layer.modules() if isinstance(inner, _BatchNorm)), None)
        if norm is not None:
            raise ModelError(
                f"layer {name} has a {type(norm).__name__}, whose statistics would be those of a micro-batch and not "
                "of the batch: use GroupNorm or LayerNorm in a pipeline"
            )
    return chain


class Handmade:
    """Modules that are given one by one: each is called with what the one before it gives, and not looked into."""

    def __init__(self, model: nn.ModuleList) -> None:
        self._model = model
        self.layers: list[tuple[str, nn.Module]] = [
            (name, Spread(name, child))
            for name, child in model._modules.items()  # noqa: SLF001  (named_children leaves out what comes again)
            if child is not None
        ]
        self.recipe: Recipe | None = None
        self.obstacles: list[str] = []

    def part(self, begin: int, end: int) -> tuple[nn.Module, list[Call]]:
        """See :class:`Chain`."""
        own, home = self.layers[begin:end], nn.Module()
        for name, layer in own:
            home.add_module(name, layer.get_submodule(name))
        return home.train(self._model.training), [layer for _, layer in own]


class Listed:
    """An nn.Sequential as a chain, those in it taken apart."""

    def __init__(self, model: nn.Sequential) -> None:
        self._model = model
        self.layers = list(_flat(model, ""))
        self.recipe: Recipe | None = None
        self.obstacles: list[str] = []

    def part(self, begin: int, end: int) -> tuple[nn.Module, list[Call]]:
        """See :class:`Chain`."""
        own = self.layers[begin:end]
        return part_of(self._model, [name for name, _ in own]), [layer for _, layer in own]


def _flat(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():  # noqa: SLF001  (named_children leaves out what comes again)
        if type(child) is nn.Sequential and len(child):
            yield from _flat(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def part_of(model: nn.Sequential, names: Sequence[str]) -> nn.Sequential:
    """Returns the layers of some names, in the order of the model, nested and named as they are there.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    >>> list(part_of(model, ["1.1"]).state_dict())
    ['1.1.weight', '1.1.bias']
    """
    inside: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        head, _, rest = name.partition(".")
        inside[head].append(rest)
    part = nn.Sequential()
    for head, child in model._modules.items():  # noqa: SLF001
        if head in inside:
            nested = inside[head] != [""] and isinstance(child, nn.Sequential)
            part.add_module(head, part_of(child, inside[head]) if nested else child)  # type: ignore[arg-type]
    return part


def shared(layers: Sequence[tuple[str, nn.Module]], apart: Sequence[Tie] = ()) -> list[frozenset[int]]:
    """Returns the sets of layers that share a parameter or a buffer, and more than those `apart`.

    >>> tied = nn.Linear(2, 2)
    >>> shared([("a", tied), ("b", nn.ReLU()), ("c", tied)])
    [frozenset({0, 2})]
    """
    holders: defaultdict[int, set[int]] = defaultdict(set)
    free = {(layer, name) for tie in apart for layer, name in zip(tie.layers, tie.names, strict=True)}
    for one, parameter in parameters_of(layers):
        if (one.layer, one.name) not in free:
            holders[id(parameter)].add(one.layer)
    for number, (_, layer) in enumerate(layers):
        for buffer in layer.buffers():
            holders[id(buffer)].add(number)
    return list(dict.fromkeys(frozenset(numbers) for numbers in holders.values() if len(numbers) > 1))


def stages_of(
    layers: Sequence[tuple[str, nn.Module]], ends: Sequence[int], ranks: int, apart: Sequence[Tie] = ()
) -> list[tuple[int, int]]:
    """Returns begin and end of the stages, if they are all layers and can be computed apart.

    Args:
        layers: of the model.
        ends: by stage, the layer behind its last one.
        ranks: that the stages are dealt to.
        apart: shared weights that each layer can have a copy of.

    Raises:
        UsageError: the stages are not all layers, or are no multiple of the ranks.
        ModelError: two of them share a weight.

    Example:
        >>> stages_of([("0", nn.Linear(2, 2)), ("1", nn.ReLU()), ("2", nn.Linear(2, 1))], [2, 3], 2)
        [(0, 2), (2, 3)]
    """
    cuts = list(zip((0, *ends), ends, strict=False))
    if not cuts or ends[-1] != len(layers) or any(begin >= end for begin, end in cuts):
        raise UsageError(
            f"ends={list(ends)} do not cut {len(layers)} layers into stages: give them in order, each stage one layer "
            f"at least, and {len(layers)} as the last"
        )
    if len(cuts) % ranks:
        raise UsageError(f"{len(cuts)} stages cannot be divided evenly among {ranks} ranks: give a multiple of {ranks}")
    stage_of = {layer: stage for stage, (begin, end) in enumerate(cuts) for layer in range(begin, end)}
    for group in shared(layers, apart):
        if len({stage_of[layer] for layer in group}) > 1:
            names = " and ".join(layers[layer][0] for layer in sorted(group))
            raise ModelError(f"layers {names} share a weight, and are in different stages: put them into one")
    return cuts
