"""What one stage of a pipeline computes, micro-batch by micro-batch, and what it keeps until the backward.

    from the stage before ──▶ inputs ──▶ module ──▶ outputs ──▶ to the stage behind        the last gives a loss instead
                          ◀── their .grad ◀── backward ◀── gradients ◀──

The inputs are leaves of a graph of their own, so a backward ends there, and each stage adds to its parameters' `.grad`
what one process would have added: the same bits, since nothing else is computed and nothing in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.pipelines.halves import Halves
from samestep.pipelines.streams import current

__all__: list[str] = []

Tensors = tuple[Tensor, ...]
Lose = Callable[[Tensors], Tensor]  # outputs -> the micro-batch's part of the step's loss, a scalar

_IN_PLACE = "a leaf Variable that requires grad"
_HOST = torch.device("cpu")


@dataclass
class _Kept:
    """Of a micro-batch, between its forward and its backward.

    Attributes:
        inputs: leaves; those from another stage want gradients.
        outputs: of the module, or the loss.
    """

    inputs: Tensors
    outputs: Tensors


class Stage:
    """One stage.

    Args:
        number: from 0.
        module: that holds the parameters.
        call: computes a micro-batch: its number, what the stage before gives -> a tensor or several. If None the
            module does, with one argument for each tensor.
        device: that it computes on.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        call: Callable[[int, Tensors], Any] | None = None,
        device: torch.device = _HOST,
    ) -> None:
        self.number = number
        self.module = module
        self._device = device
        self._call = call or (lambda _, inputs: module(*inputs))
        self._kept: dict[int, _Kept] = {}
        self._halves: dict[int, Halves] = {}

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], wants: Sequence[bool], lose: Lose | None = None
    ) -> Tensors:
        """Returns what the stage gives for a micro-batch; with `lose`, its part of the loss.

        Args:
            micro_batch: which.
            inputs: of the batch, or what the stage before gives.
            wants: for each of them, whether its gradient is wanted.
            lose: makes a loss of the outputs.

        Raises:
            ModelError: the stage gives something else than tensors, or changes its inputs in place.
        """
        pairs = zip(inputs, wants, strict=True)
        leaves = tuple(each.detach().requires_grad_(want and torch.is_grad_enabled()) for each, want in pairs)
        with current(self._device):
            outputs = self._computed(micro_batch, leaves)
            if lose is not None:
                outputs = (lose(outputs),)
        if torch.is_grad_enabled():
            self._kept[micro_batch] = _Kept(leaves, outputs)
        return outputs

    def _computed(self, micro_batch: int, leaves: Tensors) -> Tensors:
        try:
            return self._tensors(self._call(micro_batch, leaves))
        except RuntimeError as error:
            if _IN_PLACE in str(error):
                raise ModelError(
                    f"stage {self.number} changes its inputs in place, which are another stage's outputs: begin it "
                    "with another layer, or say inplace=False"
                ) from error
            raise

    def _tensors(self, given: object) -> Tensors:
        found = tuple(given) if isinstance(given, tuple | list) else (given,)
        others = [each for each in found if not isinstance(each, Tensor)]
        if others or not found:
            inside = f" with a {type(others[0]).__name__}" if others and isinstance(given, tuple | list) else ""
            what = f"{type(given).__name__}{inside}"
            raise ModelError(
                f"stage {self.number} gives a {what}: between stages a tensor can be sent, or several in a tuple"
            )
        return found

    def backward(self, micro_batch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Adds to the parameters' gradients; returns those of the inputs that want one.

        Args:
            micro_batch: whose.
            gradients: of the outputs that have one; None for a loss.
        """
        kept = self._kept.pop(micro_batch)
        outputs, given = self._pairs(kept, gradients)
        if outputs:
            torch.autograd.backward(outputs, given)
        return [_or_zeros(each, each.grad) for each in kept.inputs if each.requires_grad]

    def backward_inputs(self, micro_batch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Returns the gradients of the inputs alone; :meth:`backward_weights` does the rest."""
        kept = self._kept.pop(micro_batch)
        wanting = [each for each in kept.inputs if each.requires_grad]
        own = [each for each in self.module.parameters() if each.requires_grad]
        halves = self._halves[micro_batch] = Halves(*self._pairs(kept, gradients), wanting, own)
        return [_or_zeros(each, gradient) for each, gradient in zip(wanting, halves.first(), strict=True)]

    def backward_weights(self, micro_batch: int) -> None:
        """Adds to the parameters' gradients what :meth:`backward_inputs` has left."""
        self._halves.pop(micro_batch).second()

    def _pairs(self, kept: _Kept, gradients: Sequence[Tensor] | None) -> tuple[list[Tensor], list[Tensor | None]]:
        outputs = [each for each in kept.outputs if each.requires_grad]
        return outputs, [None] * len(outputs) if gradients is None else list(gradients)


def _or_zeros(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    """An input that nothing depends on has no gradient, and the stage before waits for one all the same."""
    return torch.zeros_like(tensor) if gradient is None else gradient
