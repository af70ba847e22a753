"""Where to cut a chain of layers into stages: the partition of which it is proved that no other makes a shorter step.

What a step takes depends on the schedule, and only fill and drain has a formula. So a partition is judged by simulating
the schedule (:mod:`samestep.schedule.simulate`), and most are ruled out without it, by a lower bound that is close
(:mod:`samestep.pipelines.bounds`).

One stage a rank: partitions come in the order of their bounds, the smallest first (A*: a prefix is extended as long as
the best that it can become is the best of all), and each is simulated, until a bound reaches the best that was found.
Of 1,771 partitions of 24 layers into 4 stages 1 to 10 are simulated.

Several stages a rank (stages k and k + p are on one rank, and share its time):

    layers   0  1 │ 2  3  4 │ 5 │ 6  7        p = 2 ranks, 2 stages each
    rank        0 │    1    │ 0 │   1         what must be even is the sum: {0, 1, 5} against {2, 3, 4, 6, 7}

a beam search: prefixes of all partitions are extended by a stage at a time, and dropped when their bound is no less
than the best step that is known. That one is the best of a few with small bounds, after single layers were moved from
stage to stage as long as it helped; the few are sought among all partitions, and among those whose largest stage is
about as small as possible, since ranks wait for each other's stages and not for their sums. Where too many prefixes
are left, those with the largest bounds are given up.

What is not proved when the limit is reached is told as a gap. torchgpipe and fairscale cut by a heuristic that gives
the cheapest layer no weight, and are not optimal for 64 to 100 of 100 lognormal chains; DeepSpeed minimises the largest
minus the smallest of parameter counts (measured on 200 chains).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from samestep.errors import UsageError
from samestep.pipelines.bounds import Ends, InterleavedBound, SegmentCosts
from samestep.pipelines.layers import Device, Layer, Link, check_num_stages
from samestep.schedule.schedule import Schedule
from samestep.schedule.simulate import Costs, simulate
from samestep.text import bytes_text

STATE = 4.0  # copies of the parameters: themselves, gradients, and two of Adam's
MAX_SIMULATED = 1000  # partitions: some 10 s with 100 layers on 8 stages
MAX_SIMULATED_INTERLEAVED = 300  # which take longer to simulate
NARROW_BEAM, WIDE_BEAM = 32, 4000  # prefixes of as many stages that are kept: for the first step; at last
_MAX_STAGE = (1.0001, 1.1, 1.3, math.inf)  # of the first step: times the smallest that its largest stage can be


@dataclass(frozen=True)
class Partition:
    ends: Ends  # by stage, the layer behind its last
    seconds: float  # of a step
    bound: float  # seconds that no partition undercuts; the same as `seconds` where this is proved to be the best
    simulated: int  # how many partitions were compared


@dataclass(frozen=True)
class PartitionProblem:
    """What is to be cut, for what.

    Raises:
        UsageError: the model cannot be cut so.

    Example:
        >>> from samestep.schedule.algorithms import one_f_one_b
        >>> layers = [Layer(name, forward=1, inputs=1, weights=1) for name in "abcd"]
        >>> PartitionProblem(layers, [Device(), Device(speed=3)], one_f_one_b(2, 4)).best().ends
        (1, 4)
    """

    layers: Sequence[Layer]
    devices: Sequence[Device]  # one for each rank, in the order of the ranks
    schedule: Schedule  # with several stages a rank only if it has whole backwards
    link: Link = field(default_factory=Link)  # between a stage and the next
    # copies of the parameters that are kept: themselves, gradients and what the optimizer remembers
    state: float = STATE
    # sets of layers that must be in one stage, such as those that share a weight
    colocated: Sequence[frozenset[int]] = ()

    def __post_init__(self) -> None:
        schedule = self.schedule
        if schedule.ranks != len(self.devices) and self.devices:
            raise UsageError(
                f"{len(self.devices)} devices for a schedule of {schedule.stages} stages on {schedule.ranks} ranks: "
                "give one for each rank"
            )
        check_num_stages(self.layers, schedule.stages if self.devices else 0)
        if schedule.stages > schedule.ranks and (schedule.split_backwards or not schedule.trains):
            raise UsageError(
                f"{schedule.name} has several stages a rank: cuts are searched for such a schedule if it trains, with "
                "whole backwards"
            )

    @cached_property
    def segments(self) -> SegmentCosts:
        devices = [self.devices[rank] for rank in self.schedule.placement]
        return SegmentCosts(self.layers, devices, self.schedule, self.link, self.state, self.colocated)

    @cached_property
    def _interleaved(self) -> InterleavedBound | None:
        """The bound, where ranks have several stages."""
        return InterleavedBound(self.segments) if self.schedule.stages > self.schedule.ranks else None

    def costs(self, ends: Sequence[int]) -> Costs:
        """Returns what the stages of a partition cost."""
        pairs = list(zip(zip((0, *ends), ends, strict=False), self.segments.devices, strict=True))
        forward, inputs, weights = (
            [float(self.segments.work_s[kind][pair]) / device.speed for pair, device in pairs] for kind in "FIW"
        )
        messages = [float(self.segments.message_s[end]) for end in ends[:-1]]
        link = self.link
        return Costs(forward, inputs, weights, messages, messages, overlap=link.overlap, overhead=link.overhead)

    def seconds(self, ends: Sequence[int]) -> float:
        """Returns what a step takes, cut so; inf where a device has too little memory."""
        fits = (self._interleaved or self.segments).fits(tuple(ends))
        return simulate(self.schedule, self.costs(ends)).seconds if fits else math.inf

    def best(self, max_simulated: int | None = None) -> Partition:
        """Returns the partition with the shortest step; of several, that which comes first in the order of the search.

        Args:
            max_simulated: how many partitions may be simulated; MAX_SIMULATED, or MAX_SIMULATED_INTERLEAVED with
                several stages a rank, if None.

        Raises:
            UsageError: no partition fits into the devices' memory; says which layer, or what could be done.
        """
        if self._interleaved is not None:
            limit = MAX_SIMULATED_INTERLEAVED if max_simulated is None else max_simulated
            found = _BeamSearch(self.segments, self._interleaved, self.seconds).best(limit)
        else:
            found = self._best_in_order(MAX_SIMULATED if max_simulated is None else max_simulated)
        if found is None:
            raise UsageError(self._reason())
        return found

    def _best_in_order(self, limit: int) -> Partition | None:
        best, seconds, simulated = None, math.inf, 0
        for bound, ends in _partitions_by_bound(self.segments):
            if best is not None and (bound >= seconds or simulated >= limit):
                return Partition(best, seconds, min(bound, seconds), simulated)
            simulated += 1
            if (found := self.seconds(ends)) < seconds:
                best, seconds = ends, found
        return None if best is None else Partition(best, seconds, seconds, simulated)

    def _reason(self) -> str:
        """Why no partition fits."""
        stages = range(self.schedule.stages)
        largest = max(device.memory for device in self.devices)
        for number, layer in enumerate(self.layers):
            least = min(float(self.segments.memory(stage)[number, number + 1]) for stage in stages)
            if least > largest:
                return (
                    f"layer {layer.name} takes {bytes_text(least)}, and the largest device has {bytes_text(largest)}: "
                    "make several layers of it, or take smaller micro-batches"
                )
        reached = np.arange(self.segments.length + 1) == 0
        for _ in stages:
            reached = (self.segments.whole & reached[:, None]).any(axis=0)
        if not reached[-1]:
            tied = "; ".join(", ".join(self.layers[one].name for one in sorted(group)) for group in self.colocated)
            return f"no {len(stages)} stages can be cut without parting layers that share a weight: {tied}"
        return (
            f"no cut into {len(stages)} stages fits: the largest device has {bytes_text(largest)}; take smaller "
            "micro-batches, more stages, or a schedule that holds fewer micro-batches"
        )


class _Prefix(NamedTuple):
    """The first stages of a partition."""

    bound: float  # seconds of the best that it can become, at least
    left: int  # stages that are missing; of two equal bounds the one that is nearer to its end is extended
    ends: Ends
    total: float = 0.0  # this and the next two: what the stages add to the bound's three terms
    forwards: float = 0.0
    remaining: float = 0.0


def _partitions_by_bound(segments: SegmentCosts) -> Iterator[tuple[float, Ends]]:
    """Yields bound and ends of every partition with one stage a rank, the smallest bounds first.

    What stages s, s + 1, … with the layers [j, n) add at least is known for each of the three terms by itself:

        T[s][j] = min over k > j of  cost of [j, k) as stage s  (+ or max)  T[s + 1][k]
    """

    def least(costs: list[Any], join: Any) -> list[Any]:
        behind = np.full(segments.length + 1, math.inf)
        behind[segments.length] = 0.0
        found = [behind]
        for stage in reversed(range(len(costs))):
            each = np.where(segments.allowed[stage], join(costs[stage], found[-1][None, :]), math.inf)
            found.append(each.min(axis=1))
        return found[::-1]

    least_sums = least(segments.sums, np.add)
    least_forwards, least_remaining = (least(each, np.maximum) for each in (segments.forwards, segments.remaining))
    heap = [_Prefix(0.0, len(segments.devices), ())]
    while heap:
        one = heapq.heappop(heap)
        if not one.left:
            yield one.bound, one.ends
            continue
        stage, begin = len(one.ends), one.ends[-1] if one.ends else 0
        total = one.total + segments.sums[stage][begin]
        forwards = np.maximum(one.forwards, segments.forwards[stage][begin])
        remaining = np.maximum(one.remaining, segments.remaining[stage][begin])
        sums = np.where(segments.allowed[stage][begin], total + least_sums[stage + 1], math.inf)
        for end in np.flatnonzero(sums < math.inf).tolist():
            largest = max(forwards[end], least_forwards[stage + 1][end])
            rest = max(remaining[end], least_remaining[stage + 1][end])
            bound = float(sums[end] + segments.before * largest + rest)
            terms = float(total[end]), float(forwards[end]), float(remaining[end])
            heapq.heappush(heap, _Prefix(bound, one.left - 1, (*one.ends, end), *terms))


class _BeamSearch:
    """The search among partitions with several stages a rank."""

    def __init__(self, segments: SegmentCosts, bound: InterleavedBound, simulate: Callable[[Ends], float]) -> None:
        self._segments, self._bound, self._simulate = segments, bound, simulate
        self._known: dict[Ends, float] = {}

    def best(self, limit: int) -> Partition | None:
        """Returns the best partition that was found; None if none fits."""
        few = [
            ends
            for times in _MAX_STAGE
            for _, ends in self._partitions(math.inf, NARROW_BEAM, self._with_small_stages(times))[0]
        ]
        whole = self._segments.whole
        for ends in few or [ends for _, ends in self._partitions(math.inf, WIDE_BEAM, whole)[0]]:
            if len(self._known) < max(1, limit):
                self._seconds(ends)
        if not self._known or (best := self._local_search(limit)) is None:
            return None
        partitions, given_up = self._partitions(self._known[best], WIDE_BEAM, whole)
        bound = given_up
        for bound, ends in partitions:
            if bound >= self._known[best] or (len(self._known) >= limit and ends not in self._known):
                break
            if self._seconds(ends) < self._known[best]:
                best = ends
        else:
            bound = given_up
        seconds = self._known[best]
        return Partition(best, seconds, min(bound, given_up, seconds), len(self._known))

    def _seconds(self, ends: Ends) -> float:
        if ends not in self._known:
            self._known[ends] = self._simulate(ends)
        return self._known[ends]

    def _local_search(self, limit: int) -> Ends | None:
        """Returns the best partition that is known, once no layer moved to the next stage makes it better."""
        best = min(self._known, key=self._known.__getitem__)
        while len(self._known) < limit:
            moved = [ends for ends in _neighbours(best) if ends not in self._known and self._bound.fits(ends)]
            better = [ends for ends in moved[: limit - len(self._known)] if self._seconds(ends) < self._known[best]]
            if not better:
                break
            best = min(better, key=self._known.__getitem__)
        return best if self._known[best] < math.inf else None

    def _with_small_stages(self, times: float) -> Any:
        """Returns which [begin, end) can be a stage, at most so many times as long as the longest has to be."""
        devices, whole = self._segments.devices, self._segments.whole
        work = self._segments.work_s["F"] + self._segments.work_s["B"]
        longest = np.append(np.full(self._segments.length, math.inf), 0.0)
        for device in reversed(devices):
            each = np.maximum(work / device.speed, longest[None, :])
            longest = np.where(whole, each, math.inf).min(axis=1)
        slowest = min(device.speed for device in devices)
        return whole & (work / slowest <= longest[0] * times)

    def _partitions(self, below: float, beam: int, allowed: Any) -> tuple[list[tuple[float, Ends]], float]:
        """Returns bounds and ends of partitions, smallest first, and the smallest bound of prefixes given up."""
        num_stages, length = len(self._segments.devices), self._segments.length
        can_finish = [np.arange(length + 1) == length]
        for _ in range(num_stages):
            can_finish.append((allowed & can_finish[-1]).any(axis=1))
        ends, sums, given_up = np.zeros((1, 1), dtype=int), np.zeros((1, len(self._bound.weights))), math.inf
        for stage in range(num_stages):
            possible = allowed & can_finish[-2 - stage]
            extended = [one for one in self._extend(stage, ends, sums, below, possible) if len(one[0])]
            if not extended:
                return [], given_up
            bounds, ends, sums = (np.concatenate(each) for each in zip(*extended, strict=True))
            order = np.argsort(bounds, kind="stable")
            if len(order) > beam:
                given_up = min(given_up, float(bounds[order[beam]]))
            bounds, ends, sums = (each[order[:beam]] for each in (bounds, ends, sums))
        return list(zip(bounds.tolist(), map(tuple, ends[:, 1:].tolist()), strict=True)), given_up

    def _extend(self, stage: int, ends: Any, sums: Any, below: float, allowed: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yields, by end of one more stage, bounds, ends and sums of the prefixes that can become a partition."""
        num_times = self._bound.num_times
        for end in range(1, self._segments.length + 1):
            fit = allowed[ends[:, -1], end]
            longer = sums[fit] + self._bound.added(stage, ends[fit, -1], end)
            least = longer + self._bound.least[stage + 1][:, end]
            bounds = least[:, :num_times].max(axis=1, initial=0.0)
            good = (bounds < below) & (least[:, num_times:] <= self._bound.limits).all(axis=1)
            yield bounds[good], np.column_stack([ends[fit][good], np.full(good.sum(), end)]), longer[good]


def _neighbours(ends: Sequence[int]) -> Iterator[Ends]:
    """Yields the partitions with one end moved by one layer."""
    inner = ends[:-1]
    for place in range(len(inner)):
        for step in (-1, 1):
            moved = [0, *inner, ends[-1]]
            moved[place + 1] += step
            if moved[place] < moved[place + 1] < moved[place + 2]:
                yield tuple(moved[1:])
