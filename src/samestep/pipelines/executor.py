"""Executes one rank's part of a schedule: a loop over its actions, on its stages, over a transport.

The schedule says everything: what is next, whose result it needs, who needs its result. So there is one loop for every
schedule and transport; torch.distributed.pipelining has a class for each. A process that holds all stages executes the
actions of all ranks, in the order in which they would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from samestep.pipelines.batch_check import ShapeKeys
from samestep.pipelines.report import StepTimer
from samestep.pipelines.stage import LossOf, Stage, Tensors
from samestep.schedule.schedule import BACKWARDS, Action, Schedule


class Transport(Protocol):
    """Carries the results of actions to the stages that need them."""

    def begin_step(self, shape_keys: ShapeKeys) -> None: ...

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None: ...

    def receive(self, action: Action) -> tuple[list[Tensor], list[bool]]:
        """Returns an action's result, and which tensors of it require a gradient."""

    def end_step(self) -> None: ...


class ScheduleExecutor:
    """One rank of a pipeline, or all."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int | None,
        stages: Mapping[int, Stage],
        transport: Transport,
        timer: StepTimer | None = None,
    ) -> None:
        self._schedule = schedule
        self._actions = (
            tuple(action for _, action in schedule.topological_order) if rank is None else schedule.rank_actions[rank]
        )
        self._stages = stages
        self._transport = transport
        self._timed = nullcontext if timer is None else timer.action
        self._local_results: dict[Action, tuple[list[Tensor], list[bool]]] = {}  # from one stage here to another

    def run(
        self, inputs: Callable[[int], Tensors], loss_of: Callable[[int], LossOf] | None, shape_keys: ShapeKeys
    ) -> list[Tensors]:
        """Takes a step; returns what the last stage gives for each micro-batch on its rank, nothing on others.

        Collective: every rank of the pipeline must call it.
        """
        results: list[Tensors] = []
        self._local_results.clear()
        self._transport.begin_step(shape_keys)
        with torch.set_grad_enabled(self._schedule.trains):
            for action in self._actions:
                if action.kind == "F":
                    results += self._forward(action, inputs, loss_of)
                elif action.kind in BACKWARDS:
                    self._backward(action)
                else:
                    with self._timed(action):
                        self._stages[action.stage].backward_weight(action.micro_batch)
        self._transport.end_step()
        return results

    def _forward(
        self, action: Action, inputs: Callable[[int], Tensors], loss_of: Callable[[int], LossOf] | None
    ) -> list[Tensors]:
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        if action.stage == 0:
            given: Sequence[Tensor] = inputs(micro_batch)
            requires_grad = [False] * len(given)
        else:
            given, requires_grad = self._receive(Action("F", action.stage - 1, micro_batch))
        is_last = action.stage + 1 == self._schedule.stages
        with self._timed(action):
            loss = loss_of(micro_batch) if loss_of and is_last else None
            outputs = stage.forward(micro_batch, given, requires_grad, loss)
        if is_last:
            return [tuple(each.detach() for each in outputs)]
        self._send(action, outputs)
        return []

    def _backward(self, action: Action) -> None:
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        next_stage = (one for one in self._schedule.dependencies(action) if one.stage == action.stage + 1)
        source = next(next_stage, None)
        gradients = None if source is None else self._receive(source)[0]
        backward = stage.backward if action.kind == "B" else stage.backward_input
        with self._timed(action):
            found = backward(micro_batch, gradients)
        if action.stage:
            self._send(action, found)

    def _receive(self, action: Action) -> tuple[list[Tensor], list[bool]]:
        if action in self._local_results:
            return self._local_results.pop(action)
        return self._transport.receive(action)

    def _send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        if self._schedule.receiver_rank(action) == self._schedule.placement[action.stage]:
            self._local_results[action] = (list(tensors), [each.requires_grad for each in tensors])
        else:
            self._transport.send(action, tensors)
