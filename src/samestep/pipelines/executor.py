"""Executes one rank's part of a schedule: a loop over its actions, on its stages, over a transport.

The schedule says everything: what is next, whose result it needs, who needs its result. So there is one loop for every
schedule and transport; torch.distributed.pipelining has a class for each. A process that holds all stages executes the
actions of all ranks, in the order in which they would.

A stage computes one micro-batch after another, and keeps until the backward what it needs there:

    from the stage before ──▶ inputs ──▶ module ──▶ outputs ──▶ to the next stage          the last gives a loss instead
                          ◀── their .grad ◀── backward ◀── gradients ◀──

The inputs are leaves of a graph of their own, so a backward ends there, and each stage adds to its parameters' `.grad`
what one process would have added: the same bits, since the same is computed in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.pipelines.batch_check import ShapeKeys
from samestep.pipelines.devices import on_device
from samestep.pipelines.report import StepTimer
from samestep.pipelines.split_backward import SplitBackward
from samestep.pipelines.transport import Transport
from samestep.schedule.schedule import BACKWARDS, Action, Schedule

Tensors = tuple[Tensor, ...]
LossOf = Callable[[Tensors], Tensor]  # outputs -> the micro-batch's part of the step's loss, a scalar

_IN_PLACE_ERROR = "a leaf Variable that requires grad"
_CPU = torch.device("cpu")


@dataclass(eq=False)
class Stage:
    number: int  # from 0
    module: nn.Module  # that holds the parameters
    # computes a micro-batch: its number, what the stage before gives -> a tensor or several; the module if None
    call: Callable[[int, Tensors], Any] | None = None
    device: torch.device = _CPU  # that it computes on
    # inputs and outputs of micro-batches in flight
    _kept: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict, init=False)
    _split: dict[int, SplitBackward] = field(default_factory=dict, init=False)

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], requires_grad: Sequence[bool], loss_of: LossOf | None = None
    ) -> Tensors:
        """Returns what the stage gives for a micro-batch; with `loss_of`, its part of the loss.

        Raises:
            ModelError: the stage gives something else than tensors, or changes its inputs in place.
        """
        pairs = zip(inputs, requires_grad, strict=True)
        leaves = tuple(each.detach().requires_grad_(needed and torch.is_grad_enabled()) for each, needed in pairs)
        with on_device(self.device):
            outputs = self._compute(micro_batch, leaves)
            if loss_of is not None:
                outputs = (loss_of(outputs),)
        if torch.is_grad_enabled():
            self._kept[micro_batch] = leaves, outputs
        return outputs

    def _compute(self, micro_batch: int, leaves: Tensors) -> Tensors:
        try:
            given = self.module(*leaves) if self.call is None else self.call(micro_batch, leaves)
        except RuntimeError as error:
            if _IN_PLACE_ERROR in str(error):
                raise ModelError(
                    f"stage {self.number} changes its inputs in place, which are another stage's outputs: begin it "
                    "with another layer, or say inplace=False"
                ) from error
            raise
        outputs = tuple(given) if isinstance(given, tuple | list) else (given,)
        others = [each for each in outputs if not isinstance(each, Tensor)]
        if others or not outputs:
            inside = f" with a {type(others[0]).__name__}" if others and isinstance(given, tuple | list) else ""
            raise ModelError(
                f"stage {self.number} gives a {type(given).__name__}{inside}: between stages a tensor can be sent, or "
                "several in a tuple"
            )
        return outputs

    def backward(self, micro_batch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Adds to the parameters' gradients; returns those of the inputs that require one."""
        inputs, outputs, gradients_in = self._pop(micro_batch, gradients)
        if outputs:
            torch.autograd.backward(outputs, gradients_in)
        return [_or_zeros(each, each.grad) for each in inputs]

    def backward_input(self, micro_batch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Returns the gradients of the inputs alone; :meth:`backward_weight` does the rest."""
        inputs, outputs, gradients_in = self._pop(micro_batch, gradients)
        weights = [each for each in self.module.parameters() if each.requires_grad]
        split = self._split[micro_batch] = SplitBackward(outputs, gradients_in, inputs, weights)
        return [_or_zeros(each, gradient) for each, gradient in zip(inputs, split.backward_input(), strict=True)]

    def backward_weight(self, micro_batch: int) -> None:
        """Adds to the parameters' gradients what :meth:`backward_input` has left."""
        self._split.pop(micro_batch).backward_weight()

    def _pop(
        self, micro_batch: int, gradients: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        """Returns the inputs and outputs that require gradients, and the gradients of the outputs."""
        inputs, outputs = ([each for each in kept if each.requires_grad] for kept in self._kept.pop(micro_batch))
        return inputs, outputs, [None] * len(outputs) if gradients is None else list(gradients)


def _or_zeros(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    """Nothing may depend on an input, and then it has no gradient; the stage before waits for one all the same."""
    return torch.zeros_like(tensor) if gradient is None else gradient


@dataclass(eq=False)
class ScheduleExecutor:
    """One rank of a pipeline, or all."""

    schedule: Schedule
    rank: int | None  # None where one process does the actions of all
    stages: Mapping[int, Stage]
    transport: Transport
    timer: StepTimer | None = None

    def __post_init__(self) -> None:
        everyone = tuple(action for _, action in self.schedule.topological_order)
        self._actions = everyone if self.rank is None else self.schedule.rank_actions[self.rank]
        self._timed = nullcontext if self.timer is None else self.timer.action

    def run(
        self, inputs: Callable[[int], Tensors], loss_of: Callable[[int], LossOf] | None, shape_keys: ShapeKeys
    ) -> list[Tensors]:
        """Takes a step; returns what the last stage gives for each micro-batch on its rank, nothing on others.

        Collective: every rank of the pipeline must call it.
        """
        results: list[Tensors] = []
        self.transport.begin_step(shape_keys)
        with torch.set_grad_enabled(self.schedule.trains):
            for action in self._actions:
                if action.kind == "F":
                    results += self._forward(action, inputs, loss_of)
                elif action.kind in BACKWARDS:
                    self._backward(action)
                else:
                    with self._timed(action):
                        self.stages[action.stage].backward_weight(action.micro_batch)
        self.transport.end_step()
        return results

    def _forward(
        self, action: Action, inputs: Callable[[int], Tensors], loss_of: Callable[[int], LossOf] | None
    ) -> list[Tensors]:
        stage, micro_batch = self.stages[action.stage], action.micro_batch
        if action.stage == 0:
            given: Sequence[Tensor] = inputs(micro_batch)
            requires_grad = [False] * len(given)
        else:
            given, requires_grad = self.transport.receive(Action("F", action.stage - 1, micro_batch))
        is_last = action.stage + 1 == self.schedule.stages
        with self._timed(action):
            loss = loss_of(micro_batch) if loss_of and is_last else None
            outputs = stage.forward(micro_batch, given, requires_grad, loss)
        if is_last:
            return [tuple(each.detach() for each in outputs)]
        self.transport.send(action, outputs)
        return []

    def _backward(self, action: Action) -> None:
        stage, micro_batch = self.stages[action.stage], action.micro_batch
        next_stage = (one for one in self.schedule.dependencies(action) if one.stage == action.stage + 1)
        source = next(next_stage, None)
        gradients = None if source is None else self.transport.receive(source)[0]
        backward = stage.backward if action.kind == "B" else stage.backward_input
        with self._timed(action):
            found = backward(micro_batch, gradients)
        if action.stage:
            self.transport.send(action, found)
