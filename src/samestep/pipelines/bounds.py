"""Lower bounds of the seconds of a step, as sums of what each stage costs, so that a search can use them.

One stage a rank. Follow micro-batch 0 through all stages and back, and wait at one stage until it has done the rest of
its work:

    stage 0   F0 ─┐                                                        ┌─ B0    back through the stages before it
    stage s       └─▶ F0 ─┐               ┌─▶ B0 │ its other work │ B(m-1) ┘
    last                  └─▶ F0 … F(a-1) ┘        the schedule says which: G = forwards, backwards, from the schedule

No step is shorter than  Σ(f + b) + Σ messages  +  (a - 1) max f  +  max G,  whichever stage one waits at, where a is
how many forwards the last stage does before its first backward. For fill and drain (a = m, G = (m - 1) b) that is what
a step takes; for 1F1B (a = 1, G = (m - p + s) f + (m - 1) b) it is 0 to 5 % less, on random chains. A message counts
with the overhead of both ranks, f and G with the overhead of the stage's own rank. Where backwards are split, b is that
of the inputs, and a second G, to the end of the stage's last work, counts that of the weights, without the way back.

Several stages a rank (:class:`InterleavedBound`). Follow a micro-batch to a rank, wait while it does its work, and
follow a micro-batch back:

    rank 0   F0.0 ─┐                                        ┌─ B0.3
    rank 1         └─▶ F1.0  all that it does from here … B1.3

Each action waits for the one before it, so no step is shorter. One can get to the rank with a forward or a backward of
micro-batch 0, through any of its stages, and leave it with the last backward of any. With equal stages, the first way
in and the last way out are m(f + b) + (p - 1)(f + b) / v of a rank's f and b: what interleaving takes. The mean over
the ranks, which the largest is never below, also counts that the work that one rank does not have another one has.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from samestep.pipelines.layers import Device, Layer, Link
from samestep.schedule.schedule import ACCUMULATES, BACKWARDS, Action, Schedule

Ends = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SegmentCosts:
    """Layers as matrices over [begin, end): what those in between cost as one stage."""

    layers: Sequence[Layer]
    devices: Sequence[Device]  # by stage
    schedule: Schedule  # of the step; the bound is that of one stage a rank
    link: Link  # between a stage and the next
    state: float  # copies of the parameters that are kept
    colocated: Sequence[frozenset[int]]  # sets of layers that must be in one stage

    @property
    def length(self) -> int:
        return len(self.layers)

    def span(self, what: str) -> Any:
        """Returns the sums of a number of the layers, [n + 1, n + 1]; negative where begin > end."""
        sums = np.concatenate([[0.0], np.cumsum([getattr(layer, what) for layer in self.layers])])
        return sums[None, :] - sums[:, None]

    @cached_property
    def message_s(self) -> Any:
        """Seconds of a message across a cut, by the layer that the cut is before; none at both ends."""
        inner = [self.link.seconds(layer.activations) for layer in self.layers[:-1]]
        return np.array([0.0, *inner, 0.0])

    @cached_property
    def message_and_overhead_s(self) -> Any:
        place = np.arange(self.length + 1)
        return self.message_s + ((place > 0) & (place < self.length)) * 2 * self.link.overhead

    @cached_property
    def work_s(self) -> dict[str, Any]:
        """By kind of action, the seconds on a device of speed 1."""
        work = {"F": self.span("forward"), "I": self.span("inputs"), "W": self.span("weights")}
        return {**work, "B": work["I"] + work["W"]}

    @cached_property
    def _backward(self) -> str:
        return "I" if self.schedule.split_backwards else "B"

    @cached_property
    def whole(self) -> Any:
        """Whether [begin, end) has layers, and separates none that must be in one stage."""
        begin, end = np.indices((self.length + 1, self.length + 1))
        whole = begin < end
        for group in self.colocated:
            first, last = min(group), max(group)
            whole &= (end <= first) | (begin > last) | ((begin <= first) & (end > last))
        return whole

    @cached_property
    def allowed(self) -> list[Any]:
        """By stage, whether [begin, end) can be one: it is whole, and fits into memory."""
        return [self.whole & (self.memory(stage) <= device.memory) for stage, device in enumerate(self.devices)]

    def memory(self, stage: int) -> Any:
        """Returns the bytes of [begin, end) as a stage."""
        held = self.schedule.peak_in_flight(self.schedule.placement[stage], stage)
        return self.span("parameters") * self.state + self.span("saved") * held

    # --- the bound of one stage a rank: Σ sums + before * max forwards + max remaining ---

    @cached_property
    def sums(self) -> list[Any]:
        """By stage, what [begin, end) adds to the way of one micro-batch, there and back."""
        trains = self.schedule.trains
        way = self.work_s["F"] + (self.work_s[self._backward] if trains else 0.0)
        messages = self.message_and_overhead_s * (2 if trains else 1)
        return [way / device.speed + messages[None, :] for device in self.devices]

    @cached_property
    def before(self) -> int:
        """Forwards of the last stage behind micro-batch 0's, and before any backward."""
        return self._warm_up(len(self.devices) - 1) - 1

    @cached_property
    def forwards(self) -> list[Any]:
        """By stage, the seconds by which each of them delays all."""
        return [
            np.maximum(self.work_s["F"] / device.speed + self._overhead_s([Action("F", stage, 0)]), self._arrival_s)
            for stage, device in enumerate(self.devices)
        ]

    @cached_property
    def remaining(self) -> list[Any]:
        """By stage, its other work between micro-batch 0's backward and its last one."""
        return [self._remaining(stage, device.speed) for stage, device in enumerate(self.devices)]

    def _remaining(self, stage: int, speed: float) -> Any:
        zeros = np.zeros_like(self.work_s["F"])
        if not self.schedule.trains:
            return zeros

        def busy_s(some: Sequence[Action]) -> Any:
            return sum((self.work_s[action.kind] for action in some), zeros) / speed + self._overhead_s(some)

        actions = self.schedule.rank_actions[stage]
        begun = self._warm_up(stage) + 1
        last = max(number for number, action in enumerate(actions) if action.kind in BACKWARDS)
        found = np.maximum(busy_s(actions[begun : last + 1]), (self.schedule.micro_batches - 1) * self._arrival_s)
        if last + 1 == len(actions):
            return found
        slowest = min(device.speed for device in self.devices)
        way_back = self.work_s[self._backward][0, :] / slowest + np.cumsum(self.message_and_overhead_s)  # at most
        return np.maximum(found, busy_s(actions[begun:]) - way_back[:, None])

    def _overhead_s(self, actions: Sequence[Action]) -> float:
        """Seconds that a rank takes for the messages of some of its actions."""
        messages = (self.schedule.num_receives(one) + self.schedule.num_sends(one) for one in actions)
        return self.link.overhead * sum(messages)

    def _warm_up(self, stage: int) -> int:
        """How many actions of a stage come before its first backward."""
        actions = self.schedule.rank_actions[stage]
        return next((number for number, action in enumerate(actions) if action.kind != "F"), len(actions))

    @cached_property
    def _arrival_s(self) -> Any:
        """Seconds that a message into a stage takes while it works; where they do not overlap, it is left out."""
        return self.message_s[:, None] * (1.0 if self.link.overlap else 0.0)

    def fits(self, ends: Ends) -> bool:
        """Whether every stage may be one, and its device has the memory."""
        return all(self.allowed[stage][pair] for stage, pair in enumerate(zip((0, *ends), ends, strict=False)))


# --- several stages a rank --------------------------------------------------------------------------

# (kind of action, stage) -> how often; "message": the one between it and the stage before, "overhead": of one message
Row = Counter[tuple[str, int]]


def bound_rows(schedule: Schedule, rank: int, *, overlap: bool) -> Iterator[Row]:
    """Yields sums that no step with whole backwards undercuts; of each rank as many, in the same order.

    Example:
        >>> from samestep.schedule.algorithms import interleaved
        >>> row = next(bound_rows(interleaved(2, 4), 1, overlap=True))
        >>> row["F", 0], row["F", 1], row["B", 3], row["message", 1]
        (1, 4, 4, 2)
    """
    actions = schedule.rank_actions[rank]
    own = [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
    place = {action: number for number, action in enumerate(actions)}
    firsts = [Action(kind, stage, 0) for kind in ("F", "B") for stage in own]
    lasts = [Action("B", stage, schedule.micro_batches - 1) for stage in own]
    for first in firsts:
        for last in lasts:
            if place[last] < place[first]:
                last = actions[-1]
            between = actions[place[first] : place[last] + 1]
            row = Row((action.kind, action.stage) for action in between)
            for number, action in enumerate(between):  # without the messages that lead there and away
                receives = schedule.num_receives(action) if number else 0
                sends = schedule.num_sends(action) if number + 1 < len(between) else 0
                row["overhead", action.stage] += receives + sends
            if not overlap:
                sent = (action for action in between[:-1] if schedule.num_sends(action))
                row += Row(("message", action.stage + (action.kind == "F")) for action in sent)
            yield _way_in(schedule, first) + row + _way_out(schedule, last.stage)


def _messages(schedule: Schedule, stages: Sequence[int]) -> Row:
    """Messages along a line of stages."""
    pairs = [pair for pair in pairwise(stages) if schedule.placement[pair[0]] != schedule.placement[pair[1]]]
    overheads = Row(("overhead", stage) for pair in pairs for stage in pair)
    return Row(("message", max(pair)) for pair in pairs) + overheads


def _way_in(schedule: Schedule, action: Action) -> Row:
    """What comes before an action of micro-batch 0."""
    stages = range(schedule.stages)
    if action.kind == "F":
        forwards = Row(("F", stage) for stage in stages[: action.stage])
        return forwards + _messages(schedule, stages[: action.stage + 1])
    back = stages[action.stage :][::-1]
    there = Row(("F", stage) for stage in stages) + _messages(schedule, stages)
    return there + Row(("B", stage) for stage in back[:-1]) + _messages(schedule, back)


def _way_out(schedule: Schedule, stage: int) -> Row:
    """What comes after a backward."""
    stages = range(stage, -1, -1)
    return Row(("B", one) for one in stages[1:]) + _messages(schedule, stages)


def activation_peaks(schedule: Schedule, rank: int) -> list[dict[int, int]]:
    """Returns by stage of a rank how many micro-batches' activations it holds, whenever that is a maximum.

    >>> from samestep.schedule.algorithms import interleaved
    >>> activation_peaks(interleaved(2, 4), 1)
    [{1: 2, 3: 1}, {1: 3, 3: 0}]
    """
    now: defaultdict[int, int] = defaultdict(int)
    peaks: list[dict[int, int]] = []
    for action in schedule.rank_actions[rank]:
        now[action.stage] += (action.kind == "F") - (action.kind in ACCUMULATES)
        if not any(all(now[stage] <= one.get(stage, 0) for stage in now) for one in peaks):
            peaks = [one for one in peaks if not all(one[stage] <= now[stage] for stage in one)] + [dict(now)]
    return peaks


class InterleavedBound:
    """Several sums for each cut, of which no step undercuts the largest, and of bytes, which must not exceed limits.

    A stage adds to each sum its features times the weights of the sum.
    """

    _FEATURES = ("F", "B", "message", "overhead", "state", "saved")

    def __init__(self, costs: SegmentCosts) -> None:
        self._costs = costs
        timed, memories = self._time_weights(), self._memory_weights()
        self.num_times = len(timed)  # sums of seconds, before those of bytes
        self.limits = np.array([limit for _, limit in memories])
        self.weights = np.array([*timed, *(weights for weights, _ in memories)])  # [sums, stages, features]
        self.least = self._least()

    def fits(self, ends: Ends) -> bool:
        """Whether every stage may be one, and every rank has the memory for its own."""
        whole = all(self._costs.whole[pair] for pair in zip((0, *ends), ends, strict=False))
        return whole and bool((self._sums(ends)[self.num_times :] <= self.limits).all())

    def _sums(self, ends: Ends) -> Any:
        pairs = zip((0, *ends), ends, strict=False)
        return np.sum([self.added(stage, begin, end) for stage, (begin, end) in enumerate(pairs)], axis=0)

    def added(self, stage: int, begin: Any, end: Any) -> Any:
        """Returns what a stage adds to the sums; of several begins, [begins, sums]."""
        return self._features[:, begin, end].T @ self.weights[:, stage].T

    def _time_weights(self) -> list[Any]:
        """Of each rank, and their means by the ranks' speeds."""
        schedule, devices = self._costs.schedule, self._costs.devices
        speeds = [devices[schedule.placement.index(rank)].speed for rank in range(schedule.ranks)]
        by_rank = [
            [self._as_weights(row) for row in bound_rows(schedule, rank, overlap=self._costs.link.overlap)]
            for rank in range(schedule.ranks)
        ]
        means = [np.average(same, axis=0, weights=speeds) for same in zip(*by_rank, strict=True)]
        return [*(one for each in by_rank for one in each), *means]

    def _as_weights(self, row: Row) -> Any:
        devices = self._costs.devices
        found = np.zeros((len(devices), len(self._FEATURES)))
        for (kind, stage), count in row.items():
            found[stage, self._FEATURES.index(kind)] = count / (devices[stage].speed if kind in "FB" else 1.0)
        return found

    def _memory_weights(self) -> list[tuple[Any, float]]:
        """With what the rank has; only where that is limited."""
        schedule, found = self._costs.schedule, []
        for rank in range(schedule.ranks):
            memory = self._costs.devices[schedule.placement.index(rank)].memory
            for peak in activation_peaks(schedule, rank) if memory < math.inf else []:
                weights = np.zeros((schedule.stages, len(self._FEATURES)))
                for stage, count in peak.items():
                    weights[stage, self._FEATURES.index("state") :] = 1.0, count
                found.append((weights, memory))
        return found

    @cached_property
    def _features(self) -> Any:
        """[features, n + 1, n + 1]: of the layers [begin, end)."""
        costs = self._costs
        messages = np.broadcast_to(costs.message_s[:, None], (costs.length + 1,) * 2)
        state = costs.span("parameters") * costs.state
        overhead = np.full_like(state, costs.link.overhead)
        return np.stack([costs.work_s["F"], costs.work_s["B"], messages, overhead, state, costs.span("saved")])

    def _least(self) -> list[Any]:
        """By stage: [sums, n + 1], what it and those behind it add at least to a sum, if it begins there."""
        least = np.full((len(self.weights), self._costs.length + 1), math.inf)
        least[:, -1] = 0.0
        found = [least]
        for stage in reversed(range(len(self._costs.devices))):
            least = np.empty_like(least)
            for number, weights in enumerate(self.weights[:, stage]):
                each = np.tensordot(weights, self._features, 1) + found[-1][number][None, :]
                least[number] = np.where(self._costs.whole, each, math.inf).min(axis=1)
            found.append(least)
        return found[::-1]
