"""Where to cut a chain whose parts are dealt to the ranks in turn: stages k and k + p lie on one, and share its time.

    layers   0  1 │ 2  3  4 │ 5 │ 6  7        p = 2 ranks, 2 stages each
    rank        0 │    1    │ 0 │   1         what must be even is the sum: {0, 1, 5} against {2, 3, 4, 6, 7}

Beginnings grow by a stage at a time, all together. Of each is known what no step that begins so can undercut:

    the largest, of some sums, of  what its stages add to the sum  +  what the stages to come add to it at least
                                   (:mod:`samestep.pipelines.waits`)  T[s][j], as in :mod:`samestep.pipelines.balance`

and it is dropped when that is no less than a step that was found. That first step is the best of a few with small
bounds, after single layers were moved from stage to stage as long as it helped; the few are sought among all cuts, and
among those whose largest stage is about as small as can be, since ranks wait for each other's stages and not for their
sums. Where too many beginnings are left, the least promising are given up, and the smallest bound of those is told:
then the result is not proved to be the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from samestep.pipelines.bounds import Chain
from samestep.pipelines.waits import Row, held, rows

__all__: list[str] = []

FEW, MANY = 32, 4000  # beginnings of as many stages that are followed: at first; at last
_LARGEST = (1.0001, 1.1, 1.3, math.inf)  # stages that are looked at first: times the smallest that the largest can be
_KINDS = ("F", "B", "hop", "hand", "state", "saved")

Ends = tuple[int, ...]


class Dealt:
    """The search among all cuts.

    Args:
        chain: to be cut; its devices by stage.
        play: returns what a step takes, cut so.
    """

    def __init__(self, chain: Chain, play: Callable[[Ends], float]) -> None:
        self._chain, self._play = chain, play
        self._known: dict[Ends, float] = {}
        timed, memories = self._timed(), self._memories()
        self._times = len(timed)
        self._limits = np.array([limit for _, limit in memories])
        self._weights = np.array([*timed, *(weights for weights, _ in memories)])  # [sums, stages, kinds]
        self._least = self._to_come()

    def best(self, most: int) -> tuple[Ends, float, float, int] | None:
        """Returns the best cut that was found, its seconds, what no cut undercuts, and how many were played.

        Args:
            most: that may be played.
        """
        self._known = {}
        few = [ends for times in _LARGEST for _, ends in self._cuts(math.inf, FEW, self._small(times))[0]]
        for ends in few or [ends for _, ends in self._cuts(math.inf, MANY, self._chain.whole)[0]]:
            if len(self._known) < max(1, most):
                self._seconds(ends)
        if not self._known or (best := self._climbed(most)) is None:
            return None
        cuts, given_up = self._cuts(self._known[best], MANY, self._chain.whole)
        bound = given_up
        for bound, ends in cuts:
            if bound >= self._known[best] or (len(self._known) >= most and ends not in self._known):
                break
            if self._seconds(ends) < self._known[best]:
                best = ends
        else:
            bound = given_up
        seconds = self._known[best]
        return best, seconds, min(bound, given_up, seconds), len(self._known)

    def fits(self, ends: Ends) -> bool:
        """Whether every stage may be one, and every rank has the memory for its own."""
        pairs = zip((0, *ends), ends, strict=False)
        return all(self._chain.whole[pair] for pair in pairs) and bool(
            (self._sums(ends)[self._times :] <= self._limits).all()
        )

    def at_least(self, ends: Ends) -> float:
        """Returns seconds that a step cut so cannot undercut."""
        return float(self._sums(ends)[: self._times].max())

    def _sums(self, ends: Ends) -> Any:
        pairs = zip((0, *ends), ends, strict=False)
        return np.sum([self._added(stage, begin, end) for stage, (begin, end) in enumerate(pairs)], axis=0)

    def _seconds(self, ends: Ends) -> float:
        if ends not in self._known:
            self._known[ends] = self._play(ends)
        return self._known[ends]

    def _climbed(self, most: int) -> Ends | None:
        """Returns the best cut that is known, when no layer that is moved to the stage beside makes it better."""
        best = min(self._known, key=self._known.__getitem__)
        while len(self._known) < most:
            moved = [ends for ends in _beside(best) if ends not in self._known and self.fits(ends)]
            better = [ends for ends in moved[: most - len(self._known)] if self._seconds(ends) < self._known[best]]
            if not better:
                break
            best = min(better, key=self._known.__getitem__)
        return best if self._known[best] < math.inf else None

    def _small(self, times: float) -> Any:
        """Returns which [begin, end) can be a stage, at most so many times as long as the longest has to be."""
        work = self._chain.works["F"] + self._chain.works["B"]
        longest = np.append(np.full(self._chain.length, math.inf), 0.0)
        for device in reversed(self._chain.devices):
            each = np.maximum(work / device.speed, longest[None, :])
            longest = np.where(self._chain.whole, each, math.inf).min(axis=1)
        slowest = min(device.speed for device in self._chain.devices)
        return self._chain.whole & (work / slowest <= longest[0] * times)

    # --- the sums ---

    def _timed(self) -> list[Any]:
        """Sums of seconds: of each rank, and their means by the ranks' speeds."""
        plan, devices = self._chain.plan, self._chain.devices
        speeds = [devices[plan.placement.index(rank)].speed for rank in range(plan.ranks)]
        found = rows(plan, beside=self._chain.link.beside)
        each = {rank: [self._as_weights(row) for row in found[rank]] for rank in found}
        means = [np.average(alike, axis=0, weights=speeds) for alike in zip(*each.values(), strict=True)]
        return [*(one for rank in each for one in each[rank]), *means]

    def _as_weights(self, row: Row) -> Any:
        found = np.zeros((len(self._chain.devices), len(_KINDS)))
        for (kind, stage), count in row.items():
            found[stage, _KINDS.index(kind)] = count / (self._chain.devices[stage].speed if kind in "FB" else 1.0)
        return found

    def _memories(self) -> list[tuple[Any, float]]:
        """Sums of bytes, and what the rank has; only where that is little."""
        plan, found = self._chain.plan, []
        for rank in range(plan.ranks):
            memory = self._chain.devices[plan.placement.index(rank)].memory
            for times in held(plan, rank) if memory < math.inf else []:
                weights = np.zeros((plan.stages, len(_KINDS)))
                for stage, count in times.items():
                    weights[stage, _KINDS.index("state") :] = 1.0, count
                found.append((weights, memory))
        return found

    @cached_property
    def _features(self) -> Any:
        """[kinds, n + 1, n + 1]: what the layers [begin, end) count for in the sums."""
        chain = self._chain
        hops = np.broadcast_to(chain.hops[:, None], (chain.length + 1,) * 2)
        state = chain.span("parameters") * chain.state
        hands = np.full_like(state, chain.link.handling)
        return np.stack([chain.works["F"], chain.works["B"], hops, hands, state, chain.span("saved")])

    def _added(self, stage: int, begin: Any, end: Any) -> Any:
        """Returns what a stage adds to the sums; of several beginnings, [beginnings, sums]."""
        return self._features[:, begin, end].T @ self._weights[:, stage].T

    def _to_come(self) -> list[Any]:
        """By stage: [sums, n + 1], what it and those behind it add at least to a sum, if it begins there."""
        least = np.full((len(self._weights), self._chain.length + 1), math.inf)
        least[:, -1] = 0.0
        found = [least]
        for stage in reversed(range(len(self._chain.devices))):
            least = np.empty_like(least)
            for number, weights in enumerate(self._weights[:, stage]):
                each = np.tensordot(weights, self._features, 1) + found[-1][number][None, :]
                least[number] = np.where(self._chain.whole, each, math.inf).min(axis=1)
            found.append(least)
        return found[::-1]

    # --- the beginnings ---

    def _cuts(self, below: float, most: int, allowed: Any) -> tuple[list[tuple[float, Ends]], float]:
        """Returns bounds and ends of cuts, the smallest bounds first, and the smallest bound of what was given up.

        Args:
            below: bounds of what is of interest.
            most: beginnings that are kept.
            allowed: which [begin, end) can be a stage.
        """
        futures = [np.arange(self._chain.length + 1) == self._chain.length]
        for _ in self._chain.devices:
            futures.append((allowed & futures[-1]).any(axis=1))
        ends, sums, given_up = np.zeros((1, 1), dtype=int), np.zeros((1, len(self._weights))), math.inf
        for stage in range(len(self._chain.devices)):
            left = allowed & futures[-2 - stage]
            grown = [one for one in self._grown(stage, ends, sums, below, left) if len(one[0])]
            if not grown:
                return [], given_up
            bounds, ends, sums = (np.concatenate(each) for each in zip(*grown, strict=True))
            order = np.argsort(bounds, kind="stable")
            if len(order) > most:
                given_up = min(given_up, float(bounds[order[most]]))
            bounds, ends, sums = (each[order[:most]] for each in (bounds, ends, sums))
        return list(zip(bounds.tolist(), map(tuple, ends[:, 1:].tolist()), strict=True)), given_up

    def _grown(self, stage: int, ends: Any, sums: Any, below: float, allowed: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yields, by end of one more stage, bounds, ends and sums of the beginnings that have a future."""
        for end in range(1, self._chain.length + 1):
            fit = allowed[ends[:, -1], end]
            longer = sums[fit] + self._added(stage, ends[fit, -1], end)
            whole = longer + self._least[stage + 1][:, end]
            bounds = whole[:, : self._times].max(axis=1, initial=0.0)
            good = (bounds < below) & (whole[:, self._times :] <= self._limits).all(axis=1)
            begun = np.column_stack([ends[fit][good], np.full(good.sum(), end)])
            yield bounds[good], begun, longer[good]


def _beside(ends: Sequence[int]) -> Iterator[Ends]:
    """Yields the cuts with one end moved by one layer."""
    inner = ends[:-1]
    for place in range(len(inner)):
        for step in (-1, 1):
            moved = [0, *inner, ends[-1]]
            moved[place + 1] += step
            if moved[place] < moved[place + 1] < moved[place + 2]:
                yield tuple(moved[1:])
