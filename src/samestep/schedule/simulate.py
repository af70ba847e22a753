"""How long a step takes: a schedule simulated with the costs of its stages and links.

A rank does its actions one after another, each as soon as its dependencies have arrived. Messages travel in one of two
ways:

    overlapped        a rank works on while its message travels; a link carries one message at a time in each direction
    (two streams)     rank 0   F0 F1 F2            link   ·0 ·1 ·2            rank 1      F0 F1 F2

    not overlapped    the copy is one more piece of work on both ranks, in the order in which it was issued:
    (one stream)      copies of a round come after what all ranks do in it, as one process would issue them
                      rank 0   F0 ·0 F1 ·1 F2                                 rank 1      ·0 F0 ·1 F1

In both, a message also keeps the rank that sends it, and the one that receives it, from working for a moment: the
overhead o of LogP (D. Culler et al., "LogP: Towards a Realistic Model of Parallel Computation", PPoPP 1993).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from samestep.errors import UsageError
from samestep.schedule.schedule import Action, Schedule


@dataclass(frozen=True)
class Costs:
    """Seconds of one micro-batch.

    Raises:
        UsageError: the numbers of stages differ, or a time is negative.
    """

    forward: Sequence[float]  # by stage
    # by stage, of a backward for the gradients of the inputs; 0 where the stage is the first, say
    inputs: Sequence[float]
    weights: Sequence[float]  # by stage, of a backward for those of the weights; a whole backward takes both
    # by stage but the last, of its activations to the next one on another rank; none where left out
    send_forward: Sequence[float] = ()
    send_backward: Sequence[float] = ()  # by stage but the last, of their gradients coming back
    overlap: bool = True  # whether messages travel while the ranks work
    overhead: float = 0.0  # that a rank itself takes to send a message, and to receive one that has come

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if not stages == len(self.inputs) == len(self.weights):
            raise UsageError(
                f"costs of {stages} forwards, {len(self.inputs)} and {len(self.weights)} halves of backwards: give one "
                "for each stage"
            )
        if any(messages and len(messages) != stages - 1 for messages in (self.send_forward, self.send_backward)):
            raise UsageError(f"{stages} stages send {stages - 1} messages: give a time for each, or none")
        times = (self.forward, self.inputs, self.weights, self.send_forward, self.send_backward, (self.overhead,))
        if any(not seconds >= 0 for each in times for seconds in each):
            raise UsageError("a time is negative, or no number")

    def action_s(self, action: Action) -> float:
        if action.kind == "B":
            return self.inputs[action.stage] + self.weights[action.stage]
        return {"F": self.forward, "I": self.inputs, "W": self.weights}[action.kind][action.stage]

    def message_s(self, action: Action) -> float:
        """Returns the seconds that an action's result takes to another rank."""
        if action.kind == "F":
            return self.send_forward[action.stage] if self.send_forward else 0.0
        return self.send_backward[action.stage - 1] if self.send_backward else 0.0


class Span(NamedTuple):
    """When a rank does an action, or a message travels."""

    rank: int  # that does it, or sends
    action: Action  # that is done, or whose result is sent
    begin: float  # in seconds from the step's begin
    end: float  # in seconds from the step's begin
    target: int | None = None  # the rank that a message goes to; None of an action


@dataclass(frozen=True)
class Timeline:
    """A simulated step, or one that was measured."""

    schedule: Schedule
    spans: tuple[Span, ...]  # all actions and messages, in the order of the schedule

    @cached_property
    def seconds(self) -> float:
        return max(span.end for span in self.spans if span.target is None)

    @cached_property
    def work(self) -> list[float]:
        """By rank, the seconds of its actions."""
        work = [0.0] * self.schedule.ranks
        for span in self.spans:
            if span.target is None:
                work[span.rank] += span.end - span.begin
        return work

    @property
    def idle(self) -> float:
        """The part of all ranks' time in which they do not work: the bubble, and what messages cost."""
        return 1 - sum(self.work) / (self.schedule.ranks * self.seconds)


def simulate(schedule: Schedule, costs: Costs, durations: Mapping[Action, float] | None = None) -> Timeline:
    """Returns when everything happens; `durations` of actions may differ by micro-batch, and are the costs' if None.

    Raises:
        UsageError: the costs are of another number of stages.

    Example:
        >>> from samestep.schedule.algorithms import fill_drain
        >>> simulate(fill_drain(4, 8), Costs([1] * 4, [1] * 4, [1] * 4)).seconds
        33.0
    """
    if len(costs.forward) != schedule.stages:
        raise UsageError(f"costs of {len(costs.forward)} stages, and the plan has {schedule.stages}")
    free = [0.0] * schedule.ranks  # by rank, when it has done its actions so far
    links: dict[tuple[int, int], float] = {}  # by sender and receiver, when the last message has arrived
    arrived: dict[tuple[Action, int], float] = {}  # by action and rank, when its result is there
    spans: list[Span] = []
    for issued in schedule.rounds:
        messages: list[tuple[Span, int]] = []
        for rank, action in issued:
            begin = max([free[rank], *(arrived[one, rank] for one in schedule.dependencies(action))])
            if costs.overhead:
                begin += costs.overhead * schedule.num_receives(action)
            end = begin + (costs.action_s(action) if durations is None else durations[action])
            free[rank] = arrived[action, rank] = end
            if costs.overhead:
                free[rank] += costs.overhead * schedule.num_sends(action)
            spans.append(Span(rank, action, begin, end))
            target = schedule.receiver_rank(action)
            if target is not None and target != rank:
                messages.append((spans[-1], target))
        for (rank, action, _, end, _), target in messages:
            begin, seconds = end + costs.overhead, costs.message_s(action)
            if costs.overlap:
                begin = max(begin, links.get((rank, target), 0.0))
                links[rank, target] = begin + seconds
            elif seconds:
                begin = max(begin, free[rank], free[target])
                free[rank] = free[target] = begin + seconds
            arrived[action, target] = begin + seconds
            spans.append(Span(rank, action, begin, begin + seconds, target))
    return Timeline(schedule, tuple(spans))


def breakdown(schedule: Schedule, costs: Costs, durations: Mapping[Action, float] | None = None) -> dict[str, float]:
    """Returns the seconds of a step, as simulated, by what they go to; they add up to the step.

    "work" is what the stages compute, evenly shared among the ranks: nothing is faster. "bubble" is what the schedule
    adds where all stages are equal, "imbalance" what unequal stages and micro-batches add (negative where the slow ones
    lie beside idle ranks), "messages" what messages add.

    Example:
        >>> from samestep.schedule.algorithms import fill_drain
        >>> breakdown(fill_drain(2, 4), Costs([1, 2], [0, 0], [2, 3], send_forward=[0.5], send_backward=[0]))
        {'work': 16.0, 'bubble': 4.0, 'imbalance': 3.0, 'messages': 0.5}
    """
    if durations is None:
        durations = {one: costs.action_s(one) for one in (action for _, action in schedule.topological_order)}

    def mean(kinds: str) -> list[float]:
        total = sum(seconds for action, seconds in durations.items() if action.kind in kinds)
        return [total / (schedule.stages * schedule.micro_batches)] * schedule.stages

    equal = replace(costs, forward=mean("F"), inputs=mean("I"), weights=mean("BW"), send_forward=(), send_backward=())
    silent = replace(equal, overhead=0.0)
    levels = [
        0.0,
        sum(durations.values()) / schedule.ranks,
        simulate(schedule, silent).seconds,
        simulate(schedule, silent, durations).seconds,
        simulate(schedule, costs, durations).seconds,
    ]
    names = ("work", "bubble", "imbalance", "messages")
    return {name: after - before for name, before, after in zip(names, levels, levels[1:], strict=False)}
