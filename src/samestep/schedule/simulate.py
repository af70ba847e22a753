"""When everything in a plan happens, on stages of known cost: what a step takes before anybody has taken it.

A rank does its actions one after another, each as soon as what it needs has come. Messages travel in one of two ways:

    beside the work         a rank works on while its message travels; a link carries one message at a time, each way
    (two streams, c10d)     rank 0   F0 F1 F2            link   ·0 ·1 ·2            rank 1      F0 F1 F2

    in its place            the copy is one more piece of work on both ranks, in the order in which it was issued:
    (one stream)            copies of a round behind what all ranks do in it, as one process would
                            rank 0   F0 ·0 F1 ·1 F2                                 rank 1      ·0 F0 ·1 F1

Either way a message keeps the rank that sends it, and the one that takes it, from its work for a moment: what LogP
calls the overhead o (D. Culler et al., "LogP: Towards a Realistic Model of Parallel Computation", PPoPP 1993).

torch's simulator of its schedules knows no durations (`_simulate_comms_compute`, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from samestep.errors import UsageError
from samestep.schedule.plan import Action, Schedule

__all__: list[str] = []


@dataclass(frozen=True)
class Costs:
    """Seconds of one micro-batch.

    Attributes:
        forward: by stage.
        inputs: of a backward, for the gradients of the stage's inputs; 0 where the stage is the first, say.
        weights: of a backward, for those of its weights; a whole backward takes both.
        ahead: by stage but the last, for its activations to the next one on another rank; none where left out.
        back: by stage but the last, for their gradients to come back.
        beside: whether messages travel beside the work.
        handling: of its own that a rank takes to send a message, and to take one that has come.

    Raises:
        UsageError: the numbers of stages differ, or a time is negative.

    Example:
        >>> Costs.even(3, forward=1, backward=2).total
        9.0
    """

    forward: Sequence[float]
    inputs: Sequence[float]
    weights: Sequence[float]
    ahead: Sequence[float] = ()
    back: Sequence[float] = ()
    beside: bool = True
    handling: float = 0.0

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if not stages == len(self.inputs) == len(self.weights):
            raise UsageError(
                f"costs of {stages} forwards, {len(self.inputs)} and {len(self.weights)} halves of backwards: give one "
                "for each stage"
            )
        if any(messages and len(messages) != stages - 1 for messages in (self.ahead, self.back)):
            raise UsageError(f"{stages} stages send {stages - 1} messages: give a time for each, or none")
        times = (self.forward, self.inputs, self.weights, self.ahead, self.back, (self.handling,))
        if any(not seconds >= 0 for each in times for seconds in each):
            raise UsageError("a time is negative, or no number")

    @classmethod
    def even(cls, stages: int, *, forward: float, backward: float, message: float = 0.0, beside: bool = True) -> Costs:
        """Returns those of stages that are alike; half of a backward is for inputs."""
        half, hops = (backward / 2,) * stages, (message,) * (stages - 1)
        return cls((forward,) * stages, half, half, hops, hops, beside)

    @property
    def total(self) -> float:
        """Seconds that one rank alone would take for a micro-batch."""
        return float(sum(self.forward) + sum(self.inputs) + sum(self.weights))

    def of(self, action: Action) -> float:
        """Returns the seconds of an action."""
        stage = action.stage
        match action.kind:
            case "F":
                return self.forward[stage]
            case "I":
                return self.inputs[stage]
            case "W":
                return self.weights[stage]
            case _:
                return self.inputs[stage] + self.weights[stage]

    def of_message(self, action: Action) -> float:
        """Returns the seconds that what an action gives takes to another rank."""
        hops, stage = (self.ahead, action.stage) if action.kind == "F" else (self.back, action.stage - 1)
        return hops[stage] if hops else 0.0


class Span(NamedTuple):
    """From when to when a rank does something, or a message travels.

    Attributes:
        rank: that does it, or sends.
        action: that is done, or whose result is sent.
        begin: in seconds from the step's begin.
        end: likewise.
        target: the rank that a message goes to; None of an action.
    """

    rank: int
    action: Action
    begin: float
    end: float
    target: int | None = None


@dataclass(frozen=True)
class Timeline:
    """A step as it would be, or was.

    Attributes:
        plan: likewise.
        spans: all actions and messages, in the order of the plan.
    """

    plan: Schedule
    spans: tuple[Span, ...]

    @cached_property
    def seconds(self) -> float:
        """What the step takes, to the last action's end."""
        return max(span.end for span in self.spans if span.target is None)

    @cached_property
    def work(self) -> list[float]:
        """By rank, the seconds that it works, without messages."""
        each = [0.0] * self.plan.ranks
        for span in self.spans:
            if span.target is None:
                each[span.rank] += span.end - span.begin
        return each

    @property
    def idle(self) -> float:
        """The part of all ranks' time in which they do not work: the bubble, and what messages cost."""
        return 1 - sum(self.work) / (self.plan.ranks * self.seconds)


def simulate(plan: Schedule, costs: Costs) -> Timeline:
    """Returns when everything happens.

    Raises:
        UsageError: the costs are of another number of stages.

    Example:
        >>> from samestep.schedule.fill_drain import fill_drain
        >>> simulate(fill_drain(4, 8), Costs.even(4, forward=1, backward=2)).seconds
        33.0
    """
    if len(costs.forward) != plan.stages:
        raise UsageError(f"costs of {len(costs.forward)} stages, and the plan has {plan.stages}")
    return Timeline(plan, tuple(_Play(plan, costs).spans()))


@dataclass
class _Play:
    """A step under way.

    Attributes:
        free: by rank, when it has done what it was given.
        links: by sender and receiver, when the last message has come.
        come: by action and rank, when its result is there.
    """

    plan: Schedule
    costs: Costs
    free: list[float] = field(default_factory=list)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    come: dict[tuple[Action, int], float] = field(default_factory=dict)

    def spans(self) -> Iterator[Span]:
        self.free = [0.0] * self.plan.ranks
        for issued in self.plan.rounds:
            done = [self._done(rank, action) for rank, action in issued]
            yield from done
            for span in done:
                target = self.plan.taker(span.action)
                if target is not None and target != span.rank:
                    yield self._message(span.rank, target, span.action, span.end + self.costs.handling)

    def _done(self, rank: int, action: Action) -> Span:
        begin = max([self.free[rank], *(self.come[one, rank] for one in self.plan.needs(action))])
        if self.costs.handling:
            begin += self.costs.handling * self.plan.taken(action)
        end = self.free[rank] = self.come[action, rank] = begin + self.costs.of(action)
        if self.costs.handling:
            self.free[rank] += self.costs.handling * self.plan.given(action)
        return Span(rank, action, begin, end)

    def _message(self, rank: int, target: int, action: Action, ready: float) -> Span:
        seconds = self.costs.of_message(action)
        if self.costs.beside:
            begin = max(ready, self.links.get((rank, target), 0.0))
            self.links[rank, target] = begin + seconds
        else:
            begin = max(ready, self.free[rank], self.free[target]) if seconds else ready
            if seconds:
                self.free[rank] = self.free[target] = begin + seconds
        self.come[action, target] = begin + seconds
        return Span(rank, action, begin, begin + seconds, target)
