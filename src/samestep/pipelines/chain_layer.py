"""Layers of a model that is cut: what each uses of the model, under the model's names, and a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[Any], Any]  # what one layer gives -> what the next gives; several tensors are a tuple


class ChainLayer(nn.Module):
    """A layer, callable by itself.

    Args:
        home: holds what the layer uses, under the model's names; made by :func:`extract`.
        name: of the layer, unique in the chain.
        targets: names of the modules, parameters and buffers that it uses.
        run: computes it with a module that has the targets: that module, and what the layer before gives.
        signature: equal for layers that do the same with other weights of the same shapes.
    """

    def __init__(
        self, home: nn.Module, name: str, targets: Sequence[str], run: Callable[[nn.Module, Any], Any], signature: Any
    ) -> None:
        super().__init__()
        self.home, self.name, self.targets, self.run, self.signature = home, name, targets, run, signature

    def forward(self, given: Any) -> Any:
        return self.run(self.home, given)


def extract(model: nn.Module, targets: Iterable[str], constants: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Returns a module with what the model has under some names, in the model's order: the same modules and tensors.

    So its state_dict has the keys of the model's, and a checkpoint of all parts is a checkpoint of the model.

    `constants` are tensors that the model does not have, under names that are among the targets.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> list(extract(model, ["1.1"]).state_dict())
        ['1.1.weight', '1.1.bias']
    """
    order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def rank(target: str) -> tuple[int, int]:
        if target in order:
            return order[target], -1
        owner, _, name = target.rpartition(".")
        return order[owner], [*model.get_submodule(owner)._parameters, name].index(name)  # noqa: SLF001

    def container() -> nn.Module:
        made = nn.Module()
        made.training = model.training
        return made

    home = container()
    for target in sorted(targets, key=rank):
        *path, name = target.split(".")
        place, source = home, model
        for one in path:
            source = getattr(source, one)
            if one not in place._modules:  # noqa: SLF001
                place.add_module(one, container())
            place = getattr(place, one)
            if place is source:  # the whole of it is there already
                break
        else:
            if constants and target in constants:
                place.register_buffer(name, constants[target], persistent=False)
            elif name in source._buffers:  # noqa: SLF001
                persistent = name not in source._non_persistent_buffers_set  # noqa: SLF001
                place.register_buffer(name, getattr(source, name), persistent=persistent)
            else:
                setattr(place, name, getattr(source, name))
    return home


@dataclass(frozen=True)
class LayerChain:
    """A model as layers that are called one after another."""

    model: nn.Module
    layers: Sequence[ChainLayer]
    obstacles: Sequence[str] = ()  # to more layers, in words
    digest: str = ""  # of a traced model's operations, equal on ranks that have one model; empty for others
    splits: Sequence[int] = ()  # where a traced model was split: by layer, the operation behind its last
    constants: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that a traced forward creates, by name

    def extract_stage(self, begin: int, end: int) -> tuple[nn.Module, list[Call]]:
        """Returns a module with what some layers have, under the model's names, and what computes each of them."""
        own = self.layers[begin:end]
        home = extract(self.model, {name for layer in own for name in layer.targets}, self.constants)
        return home, [partial(layer.run, home) for layer in own]


def as_argument(given: tuple[Tensor, ...]) -> Any:
    """Returns what one layer gives, a tensor or several in a tuple, as the one argument of the next."""
    return given[0] if len(given) == 1 else given


def sequential(layers: Sequence[Call]) -> Callable[..., Any]:
    """Returns layers as one function of a batch's inputs."""

    def call(*inputs: Tensor) -> Any:
        given = as_argument(inputs)
        for layer in layers:
            given = layer(given)
        return given

    return call


@contextmanager
def preserve_state(*modules: nn.Module) -> Iterator[None]:
    """Restores modes, buffers and gradients at the end."""
    modes = [(one, one.training) for module in modules for one in module.modules()]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    try:
        yield
    finally:
        for one, mode in modes:
            one.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
