"""Whether a model that was cut into layers is still itself: values, and gradients in training, in both modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.pipelines.cutting import Call
from samestep.runtime import rng

__all__: list[str] = []

_NOISE = 1e-5  # of a norm, on devices that add up in another order each time


def check_equivalence(model: nn.Module, layers: Sequence[nn.Module], sample: Sequence[Tensor]) -> None:
    """Compares layers, called one after another, with the model's own forward; all stay as they are.

    Raises:
        ModelError: the model gives something else than tensors, or they differ; what a forward does beside its
            operations (a precision, a block without gradients) is not followed.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    with left_alone(model, *layers):
        for training in (True, False):
            for one in (model, *layers):
                one.train(training)
            right = _found(model, sample, model, parameters if training else [])
            ours = _found(chained(layers), sample, model, parameters if training else [])
            if len(right) != len(ours) or not all(map(_close, right, ours)):
                what = "values or gradients in training" if training else "values in evaluation"
                raise ModelError(
                    f"cut into layers, {type(model).__name__} gives other {what}: its forward does something beside "
                    "its operations (autocast, no_grad, random numbers of its own), which belongs into a module of its "
                    "own"
                )


def chained(layers: Sequence[nn.Module]) -> Call:
    """Returns layers as one function of a batch's inputs."""

    def call(*inputs: Tensor) -> Any:
        given: Any = inputs if len(inputs) > 1 else inputs[0]
        for layer in layers:
            given = layer(given)
        return given

    return call


def _found(
    call: Callable[..., Any], sample: Sequence[Tensor], model: nn.Module, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the tensors that a call gives, and their gradients.

    Raises:
        ModelError: it gives something else.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    with rng.keep_generators():
        torch.manual_seed(0)
        given = call(*sample)
    outputs: list[Tensor] = list(given) if isinstance(given, tuple | list) else [given]
    if not all(isinstance(each, Tensor) for each in outputs):
        name, what = type(model).__name__, type(given).__name__
        raise ModelError(f"{name} gives a {what}: in a pipeline a tensor is given, or several in a tuple")
    wanting = [each for each in outputs if each.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if parameters and wanting:
        ones = [torch.ones_like(each) for each in wanting]
        gradients = torch.autograd.grad(wanting, parameters, ones, allow_unused=True)
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return [
        each.detach() for each in (*outputs, *(each if each is not None else torch.zeros(()) for each in gradients))
    ]


def _close(right: Tensor, ours: Tensor) -> bool:
    if right.shape != ours.shape or right.dtype != ours.dtype:
        return False
    apart = (right.double() - ours.double()).norm()
    return torch.equal(right, ours) or bool(apart <= _NOISE * right.double().norm())


@contextmanager
def left_alone(*modules: nn.Module) -> Iterator[None]:
    """Leaves modes and buffers as they were."""
    modes = [(one, one.training) for module in modules for one in module.modules()]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        for one, mode in modes:
            one.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
