"""Where to cut a chain of layers: the cut of which it is proved that no other makes a shorter step.

What a step takes depends on the schedule, and only fill and drain has a formula. So a cut is judged by playing the
schedule (:mod:`samestep.schedule.simulate`), and most cuts are ruled out unplayed, by a bound that is close
(:mod:`samestep.pipelines.bounds`):

    1  cuts come in the order of their bounds, the smallest first: a beginning is followed as long as the best that it
       can end as is the best of all (A*), so nobody looks at most of them
    2  each is played, until a bound reaches the best that was found: then no cut that is left makes a shorter step

With 24 layers on 4 stages 1 to 10 of 1,771 cuts are played. What is left when it has been enough is told as a gap.

torchgpipe and fairscale cut by a heuristic that gives the cheapest layer no weight, and are off in 64 to 100 of 100
lognormal chains; DeepSpeed minimises the largest minus the smallest of parameter counts (measured on 200 chains).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from samestep.errors import UsageError
from samestep.pipelines.bounds import Chain
from samestep.pipelines.dealt import Dealt
from samestep.pipelines.layers import Device, Layer, Link, check_chain
from samestep.schedule.plan import Schedule
from samestep.schedule.simulate import Costs, simulate
from samestep.text import bytes_text

__all__: list[str] = []

STATE = 4.0  # copies of the parameters: themselves, gradients, and two of Adam's
MOST_PLAYED = 1000  # cuts: some 10 s with 100 layers on 8 stages
MOST_DEALT = 300  # of several stages a rank, which take longer to play


@dataclass(frozen=True)
class Split:
    """A chain cut into stages.

    Attributes:
        ends: by stage, the layer behind its last.
        seconds: of a step.
        bound: seconds that no cut undercuts; the same as `seconds` where this is proved to be the best.
        played: how many cuts were compared.
    """

    ends: tuple[int, ...]
    seconds: float
    bound: float
    played: int

    @property
    def stages(self) -> list[tuple[int, int]]:
        """First layer, and the one behind the last, of each stage.

        >>> Split((2, 5), 1.0, 1.0, 1).stages
        [(0, 2), (2, 5)]
        """
        return pairs_of(self.ends)

    @property
    def gap(self) -> float:
        """How much shorter a step could be at most, as a part of it."""
        return 1 - self.bound / self.seconds if self.seconds else 0.0


def pairs_of(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Returns begin and end of each stage."""
    return list(zip((0, *ends), ends, strict=False))


@dataclass(frozen=True)
class PartitionProblem:
    """What is to be cut, for what.

    Attributes:
        layers: in their order.
        devices: one for each rank, in the order of the ranks.
        plan: the schedule; of several stages a rank if it has whole backwards.
        link: between a stage and the next.
        state: copies of the parameters that are kept: themselves, gradients and what the optimizer remembers.
        together: sets of layers that must be in one stage, such as those that share a weight.

    Raises:
        UsageError: the model cannot be cut so.

    Example:
        >>> from samestep.schedule.one_f_one_b import one_f_one_b
        >>> layers = [Layer(name, forward=1, inputs=1, weights=1) for name in "abcd"]
        >>> PartitionProblem(layers, [Device(), Device(speed=3)], one_f_one_b(2, 4)).best().ends
        (1, 4)
    """

    layers: Sequence[Layer]
    devices: Sequence[Device]
    plan: Schedule
    link: Link = field(default_factory=Link)
    state: float = STATE
    together: Sequence[frozenset[int]] = ()

    def __post_init__(self) -> None:
        if self.plan.ranks != len(self.devices) and self.devices:
            raise UsageError(
                f"{len(self.devices)} devices for a schedule of {self.plan.stages} stages on {self.plan.ranks} ranks: "
                "give one for each rank"
            )
        check_chain(self.layers, self.plan.stages if self.devices else 0)
        if self.plan.stages > self.plan.ranks and (self.plan.splits or not self.plan.trains):
            raise UsageError(
                f"{self.plan.name} has several stages a rank: cuts are searched for such a schedule if it trains, with "
                "whole backwards"
            )

    @cached_property
    def chain(self) -> Chain:
        """The layers as matrices."""
        return Chain(self.layers, self._holders, self.plan, self.link, self.state, self.together)

    @property
    def _holders(self) -> list[Device]:
        """By stage, the device of its rank."""
        return [self.devices[rank] for rank in self.plan.placement]

    @cached_property
    def _dealt(self) -> Dealt | None:
        """The search, where ranks have several stages."""
        return Dealt(self.chain, self.seconds) if self.plan.stages > self.plan.ranks else None

    def costs(self, ends: Sequence[int]) -> Costs:
        """Returns what the stages of a cut cost."""
        works = self.chain.works
        pairs = list(zip(pairs_of(ends), self._holders, strict=True))
        forward, inputs, weights = (
            [float(works[kind][pair]) / device.speed for pair, device in pairs] for kind in ("F", "I", "W")
        )
        hops = [float(self.chain.hops[end]) for end in ends[:-1]]
        return Costs(forward, inputs, weights, hops, hops, beside=self.link.beside, handling=self.link.handling)

    def seconds(self, ends: Sequence[int]) -> float:
        """Returns what a step takes, cut so; inf where a device has too little memory."""
        fits = self._dealt.fits(tuple(ends)) if self._dealt else self.chain.at_least(ends) < math.inf
        if not fits:
            return math.inf
        return simulate(self.plan, self.costs(ends)).seconds

    def best(self, most: int | None = None) -> Split:
        """Returns the cut with the shortest step; of several, that which comes first in the order of the search.

        Args:
            most: how many cuts may be played; MOST_PLAYED, or MOST_DEALT with several stages a rank, if None.

        Raises:
            UsageError: no cut fits into the devices' memory; says which layer, or what could be done.
        """
        if self._dealt:
            if found := self._dealt.best(MOST_DEALT if most is None else most):
                return Split(*found)
            raise UsageError(self._why_not())
        most = MOST_PLAYED if most is None else most
        best, seconds, played = None, math.inf, 0
        for bound, ends in _Search(self.chain).cuts():
            if best is not None and (bound >= seconds or played >= most):
                return Split(best, seconds, min(bound, seconds), played)
            played += 1
            if (took := self.seconds(ends)) < seconds:
                best, seconds = ends, took
        if best is None:
            raise UsageError(self._why_not())
        return Split(best, seconds, seconds, played)

    def _why_not(self) -> str:
        stages = range(self.plan.stages)
        largest = max(device.memory for device in self.devices)
        for number, layer in enumerate(self.layers):
            least = min(float(self.chain.memory(stage)[number, number + 1]) for stage in stages)
            if least > largest:
                return (
                    f"layer {layer.name} takes {bytes_text(least)}, and the largest device has {bytes_text(largest)}: "
                    "make several layers of it, or take smaller micro-batches"
                )
        begun = np.arange(self.chain.length + 1) == 0
        for _ in stages:
            begun = (self.chain.whole & begun[:, None]).any(axis=0)
        if not begun[-1]:
            tied = "; ".join(", ".join(self.layers[one].name for one in sorted(group)) for group in self.together)
            return f"no {len(stages)} stages can be cut without parting layers that share a weight: {tied}"
        return (
            f"no cut into {len(stages)} stages fits: the largest device has {bytes_text(largest)}; take smaller "
            "micro-batches, more stages, or a schedule that holds fewer micro-batches"
        )


class _Beginning(NamedTuple):
    """The first stages of a cut.

    Attributes:
        bound: seconds of the best that it can end as, at least.
        left: stages that are to come; of two as good the one that is nearer to its end is followed.
        ends: of the stages.
        total, forwards, rest: what they add to the bound's three terms.
    """

    bound: float
    left: int
    ends: tuple[int, ...]
    total: float = 0.0
    forwards: float = 0.0
    rest: float = 0.0


class _Search:
    """All cuts in the order of their bounds, without looking at all cuts.

    What stages s, s + 1, … with the layers [j, n) add at least is known for each of the three terms by itself:

        T[s][j] = min over k > j of  cost of [j, k) as stage s  (+ or max)  T[s + 1][k]

    Args:
        chain: to be cut.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._allowed = chain.allowed
        self._sums = self._least(chain.sums, np.add)
        self._forwards = self._least(chain.forwards, np.maximum)
        self._rest = self._least(chain.rest, np.maximum)

    def _least(self, costs: list[Any], joined: Any) -> list[Any]:
        behind = np.full(self._chain.length + 1, math.inf)
        behind[self._chain.length] = 0.0
        found = [behind]
        for stage in reversed(range(len(costs))):
            each = np.where(self._allowed[stage], joined(costs[stage], found[-1][None, :]), math.inf)
            found.append(each.min(axis=1))
        return found[::-1]

    def cuts(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yields bound and ends of every cut, the smallest bounds first."""
        waiting = [_Beginning(0.0, len(self._allowed), ())]
        while waiting:
            one = heapq.heappop(waiting)
            if not one.left:
                yield one.bound, one.ends
                continue
            for further in self._further(one):
                heapq.heappush(waiting, further)

    def _further(self, one: _Beginning) -> Iterator[_Beginning]:
        """Yields a beginning with one more stage, of every length with which it has an end."""
        stage, begin, chain = len(one.ends), one.ends[-1] if one.ends else 0, self._chain
        total = one.total + chain.sums[stage][begin]
        forwards = np.maximum(one.forwards, chain.forwards[stage][begin])
        rest = np.maximum(one.rest, chain.rest[stage][begin])
        sums = np.where(self._allowed[stage][begin], total + self._sums[stage + 1], math.inf)
        for end in np.flatnonzero(sums < math.inf).tolist():
            most = max(forwards[end], self._forwards[stage + 1][end])
            bound = sums[end] + chain.before * most + max(rest[end], self._rest[stage + 1][end])
            terms = float(total[end]), float(forwards[end]), float(rest[end])
            yield _Beginning(float(bound), one.left - 1, (*one.ends, end), *terms)
