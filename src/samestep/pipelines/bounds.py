"""How short a step can be at best, cut so: the sum of a few numbers of each stage, so that a search can use it.

Follow micro-batch 0 through all stages and back, and wait at one stage on the way, while it does the rest of its work:

    stage 0   F0 ─┐                                                        ┌─ B0    back through the stages before it
    stage s       └─▶ F0 ─┐               ┌─▶ B0 │ its other work │ B(m-1) ┘
    last                  └─▶ F0 … F(a-1) ┘        the schedule says which: G = forwards, backwards, from the plan

No step is shorter than  Σ(f + b) + Σ messages  +  (a - 1) max f  +  max G,  whichever stage one waits at, where a is
how many forwards the last stage does before its first backward. For fill and drain (a = m, G = (m - 1) b) that is what
a step takes; for 1F1B (a = 1, G = (m - p + s) f + (m - 1) b) it is 0 to 5 % less, on random chains. A message counts
with what both ranks take to handle it, f and G with what the stage's own rank takes for its messages.

Where backwards are in two parts, b is that of the inputs, and a second G, to the end of the stage's last work, counts
that of the weights, without the way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from samestep.pipelines.layers import Device, Layer, Link
from samestep.schedule.plan import BACKWARDS, Action, Schedule

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Chain:
    """Layers as matrices of [begin, end): what those in between cost as one stage.

    Attributes:
        layers: in their order.
        devices: by stage.
        plan: the schedule; the bound is that of one stage a rank.
        link: between a stage and the next.
        state: copies of the parameters that are kept.
        together: sets of layers that must be in one stage.
    """

    layers: Sequence[Layer]
    devices: Sequence[Device]
    plan: Schedule
    link: Link
    state: float
    together: Sequence[frozenset[int]]

    @property
    def length(self) -> int:
        """Of the chain."""
        return len(self.layers)

    def span(self, what: str) -> Any:
        """Returns the sums of a number of the layers, [n + 1, n + 1]; negative where begin > end."""
        sums = np.concatenate([[0.0], np.cumsum([getattr(layer, what) for layer in self.layers])])
        return sums[None, :] - sums[:, None]

    @cached_property
    def hops(self) -> Any:
        """Seconds of a message across a cut, by the layer that the cut stands before; none at both ends."""
        inner = [self.link.seconds(layer.activations) for layer in self.layers[:-1]]
        return np.array([0.0, *inner, 0.0])

    @cached_property
    def crossings(self) -> Any:
        """The same with what it takes to send it and to take it."""
        return self.hops + self._inner * 2 * self.link.handling

    @cached_property
    def _inner(self) -> Any:
        """Whether a cut stands between two layers, by the layer behind it."""
        place = np.arange(self.length + 1)
        return (place > 0) & (place < self.length)

    @cached_property
    def works(self) -> dict[str, Any]:
        """By kind of action, the seconds on a device of speed 1."""
        works = {"F": self.span("forward"), "I": self.span("inputs"), "W": self.span("weights")}
        return {**works, "B": works["I"] + works["W"]}

    @cached_property
    def backward(self) -> str:
        """What the stage before waits for."""
        return "I" if self.plan.splits else "B"

    @cached_property
    def allowed(self) -> list[Any]:
        """By stage, whether [begin, end) can be one: it fits, and parts nothing that must stay together."""
        memories = enumerate(device.memory for device in self.devices)
        return [self.whole & (self.memory(stage) <= memory) for stage, memory in memories]

    @cached_property
    def whole(self) -> Any:
        """Whether [begin, end) has layers, and parts nothing that must stay together."""
        begin, end = np.indices((self.length + 1, self.length + 1))
        whole = begin < end
        for group in self.together:
            first, last = min(group), max(group)
            whole &= (end <= first) | (begin > last) | ((begin <= first) & (end > last))
        return whole

    def memory(self, stage: int) -> Any:
        """Returns the bytes of [begin, end) as a stage."""
        held = self.plan.most_held(self.plan.placement[stage], stage)
        return self.span("parameters") * self.state + self.span("saved") * held

    # --- the bound: Σ sums + before · max forwards + max rest ---

    @cached_property
    def sums(self) -> list[Any]:
        """By stage, what [begin, end) adds to the way of one micro-batch, there and back."""
        way = self.works["F"] + (self.works[self.backward] if self.plan.trains else 0.0)
        messages = self.crossings * (2 if self.plan.trains else 1)
        return [way / device.speed + messages[None, :] for device in self.devices]

    @cached_property
    def before(self) -> int:
        """Forwards of the last stage behind micro-batch 0's, and before any backward."""
        return self._begun(len(self.devices) - 1) - 1

    @cached_property
    def forwards(self) -> list[Any]:
        """By stage, the seconds that each of them holds everybody up."""
        return [
            np.maximum(self.works["F"] / device.speed + self._handled([Action("F", stage, 0)]), self._message)
            for stage, device in enumerate(self.devices)
        ]

    @cached_property
    def rest(self) -> list[Any]:
        """By stage, its other work between micro-batch 0's backward and its last one."""
        return [self._rest(stage, device.speed) for stage, device in enumerate(self.devices)]

    def _rest(self, stage: int, speed: float) -> Any:
        none = np.zeros_like(self.works["F"])
        if not self.plan.trains:
            return none
        order = self.plan.orders[stage]
        last = max(number for number, action in enumerate(order) if action.kind in BACKWARDS)
        between = order[self._begun(stage) + 1 : last + 1]
        messages = (self.plan.micro_batches - 1) * self._message
        busy = sum((self.works[action.kind] for action in between), none) / speed + self._handled(between)
        found = np.maximum(busy, messages)
        if last + 1 == len(order):
            return found
        slowest = min(device.speed for device in self.devices)
        way_back = self.works[self.backward][0, :] / slowest + np.cumsum(self.crossings)  # at most, of all before
        behind = order[self._begun(stage) + 1 :]
        whole = sum((self.works[action.kind] for action in behind), none) / speed + self._handled(behind)
        return np.maximum(found, whole - way_back[:, None])

    def _handled(self, actions: Sequence[Action]) -> float:
        """Seconds that a rank takes for the messages of some of its actions."""
        return self.link.handling * sum(self.plan.taken(one) + self.plan.given(one) for one in actions)

    def _begun(self, stage: int) -> int:
        """How many actions of a stage come before its first backward."""
        order = self.plan.orders[stage]
        return next((number for number, action in enumerate(order) if action.kind != "F"), len(order))

    @cached_property
    def _message(self) -> Any:
        """Seconds that a message into a stage takes beside its work; as a part of it, it is left out."""
        return self.hops[:, None] * (1.0 if self.link.beside else 0.0)

    def at_least(self, ends: Sequence[int]) -> float:
        """Returns seconds that a step cut so cannot undercut; inf where a device has too little memory."""
        pairs = list(zip((0, *ends), ends, strict=False))
        if not all(self.allowed[stage][pair] for stage, pair in enumerate(pairs)):
            return math.inf
        total = sum(float(self.sums[stage][pair]) for stage, pair in enumerate(pairs))
        forwards = max(float(self.forwards[stage][pair]) for stage, pair in enumerate(pairs))
        return total + self.before * forwards + max(float(self.rest[stage][pair]) for stage, pair in enumerate(pairs))
