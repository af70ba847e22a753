"""Carries out one rank's part of a plan: a loop over its actions, on its stages, with what others send.

The plan says everything: what to do next, whose result it needs, who needs its own. So there is one loop for every
schedule and every transport; torch.distributed.pipelining has a class for each. A process that has all stages, on
devices of its own, is all ranks of the plan: it issues what they do in the order in which they would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from samestep.pipelines.batch import Kinds
from samestep.pipelines.stage import Lose, Stage, Tensors
from samestep.pipelines.stopwatch import Stopwatch
from samestep.schedule.plan import BACKWARDS, Action, Schedule

__all__: list[str] = []


class Transport(Protocol):
    """What carries tensors from rank to rank."""

    def begin(self, kinds: Kinds) -> None:
        """A step begins."""

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Sends what an action gives."""

    def receive(self, action: Action) -> tuple[list[Tensor], list[bool]]:
        """Returns what another rank's action gives, and which of it wants gradients."""

    def end(self) -> None:
        """A step is over."""


class Interpreter:
    """One rank of a pipeline, or all.

    Args:
        plan: of every step.
        rank: on the pipeline; None for all of them.
        stages: those of this rank, by number.
        transport: to the other ranks.
        watch: notes when it does what.
    """

    def __init__(
        self,
        plan: Schedule,
        rank: int | None,
        stages: Mapping[int, Stage],
        transport: Transport,
        watch: Stopwatch | None = None,
    ) -> None:
        self._plan = plan
        self._order = tuple(action for _, action in plan.in_time) if rank is None else plan.orders[rank]
        self._stages = stages
        self._transport = transport
        self._noted = nullcontext if watch is None else watch.action
        self._here: dict[Action, tuple[list[Tensor], list[bool]]] = {}  # from a stage of this rank to another

    def run(
        self,
        inputs: Callable[[int], Tensors],
        lose: Callable[[int], Lose] | None,
        kinds: Kinds,
    ) -> list[Tensors]:
        """Does a step; returns what the last stage gives of each micro-batch on its rank, nothing on others.

        Collective: every rank of the pipeline must call it.

        Args:
            inputs: a micro-batch's, for the first stage.
            lose: what makes a loss of a micro-batch's outputs, for the last; None where outputs are wanted.
            kinds: by micro-batch, its shapes; the same on all ranks.
        """
        given: list[Tensors] = []
        self._here.clear()
        self._transport.begin(kinds)
        with torch.set_grad_enabled(self._plan.trains):
            for action in self._order:
                if action.kind == "F":
                    given += self._forward(action, inputs, lose)
                elif action.kind in BACKWARDS:
                    self._backward(action)
                else:
                    with self._noted(action):
                        self._stages[action.stage].backward_weights(action.micro_batch)
        self._transport.end()
        return given

    def _forward(
        self, action: Action, inputs: Callable[[int], Tensors], lose: Callable[[int], Lose] | None
    ) -> list[Tensors]:
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        if action.stage == 0:
            given: Sequence[Tensor] = inputs(micro_batch)
            wants = [False] * len(given)
        else:
            given, wants = self._taken(Action("F", action.stage - 1, micro_batch))
        is_last = action.stage + 1 == self._plan.stages
        with self._noted(action):
            found = stage.forward(micro_batch, given, wants, lose(micro_batch) if lose and is_last else None)
        if is_last:
            return [tuple(each.detach() for each in found)]
        self._give(action, found)
        return []

    def _backward(self, action: Action) -> None:
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        behind = next((one for one in self._plan.needs(action) if one.stage == action.stage + 1), None)
        gradients = None if behind is None else self._taken(behind)[0]
        act = stage.backward if action.kind == "B" else stage.backward_inputs
        with self._noted(action):
            found = act(micro_batch, gradients)
        if action.stage:
            self._give(action, found)

    def _taken(self, action: Action) -> tuple[list[Tensor], list[bool]]:
        """Returns what an action gives, and which of it wants gradients."""
        return self._here.pop(action) if action in self._here else self._transport.receive(action)

    def _give(self, action: Action, tensors: Sequence[Tensor]) -> None:
        if self._plan.taker(action) == self._plan.placement[action.stage]:
            self._here[action] = (list(tensors), [each.requires_grad for each in tensors])
        else:
            self._transport.send(action, tensors)
