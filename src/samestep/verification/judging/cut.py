"""Models that the script cuts into parts, a part on each rank: whether their gradients are those of one process.

A parameter, or a rank's part of it, is found in one process by its first values. The norms of the gradients are
compared, step by step: one process at its own pace has the same ones in all steps if it begins with the same values and
takes the same samples. Of a parameter that is cut, it is the norm of all parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from samestep.text import plural
from samestep.verification.findings import AGREES, Finding
from samestep.verification.journal import Event
from samestep.verification.judging import rates
from samestep.verification.judging.placement import Place
from samestep.verification.judging.record import Rank, Record, of_optimizer
from samestep.verification.report import Report

_SAME = 1e-3  # of a norm
_APART = 1e-2
_SMALL = 1e-4  # of the whole gradient's norm: smaller ones are held against this, they may be rounding alone
_MOST = 0.5  # of the parameters that are found again: the samples are those of one process
_FEWEST = 4  # of them
_FIRST = 3  # steps: rounding makes more of later ones
_STEPS = 8  # to be compared, at least, where all are the same
_OUTCOMES = ("initial_state", "gradients", "updates", "parameters", "data", "control")


@dataclass(frozen=True)
class _Pair:
    """The norms of a parameter's gradient in a step: of a rank, or of the parts of all ranks; and of one process."""

    rank: Rank
    name: str
    of: str  # its name in one process
    mine: float
    other: float
    least: float

    def is_within(self, share: float) -> bool:
        return abs(self.mine - self.other) <= share * max(self.other, self.least)


@dataclass
class Parts:
    """The parts of a model that ranks hold, and the whole of one process, `alone`, at its own pace.

    `places` says where what each rank holds lies in that, where this is known and all of it is held; `compared` are
    parameters of one process that have no norm here, and whose first gradients are known to be right.
    """

    record: Record
    alone: Record
    places: Sequence[Mapping[str, Place]] | None = None
    compared: Collection[str] = ()

    def find_apart(self, report: Report) -> None:
        """Adds the first parameter whose gradient is not that of one process, though most others are."""
        for place in range(min(_FIRST, self._steps) if self._are_whole else 0):
            if not rates.are_alike_by_place(self.record, self.alone, self._places, place):
                return
            pairs = [pair for pair in self._pairs(place) if pair.mine or pair.other]  # zeros are alike for any samples
            same = sum(pair.is_within(_SAME) for pair in pairs)
            if len(pairs) < _FEWEST or same < _MOST * len(pairs):
                return
            if apart := [pair for pair in pairs if not pair.is_within(_APART)]:
                report.add([_finding(apart[0], self.record.ranks[0].steps[place], same)])
                return

    def cover(self, report: Report) -> bool:
        """Says, and returns, whether all is as in one process: each part begins and goes on like it in all steps."""
        if self._steps < _STEPS or not self._are_whole or not self._takes_as_many:
            return False
        left = {place.name for held in self._places for place in held.values()}
        for place in range(self._steps):
            share, pairs = _SAME if place < _FIRST else _APART, list(self._pairs(place))
            are_alike = rates.are_alike_by_place(self.record, self.alone, self._places, place)
            if not are_alike or not all(pair.is_within(share) for pair in pairs):
                return False
            left -= {pair.of for pair in pairs}
        if left - {*self.compared}:  # a sparse gradient has no norm here, and what no optimizer of torch steps has none
            return False
        margin = f"{plural(self._steps, 'step')} of one process at its own pace, by the norms of the gradients"
        for name in _OUTCOMES:
            report.cover(name, AGREES, margin)
        return True

    @property
    def _steps(self) -> int:
        every = [*self.record.ranks, *self.alone.ranks[:1]]
        return min(len(rank.steps) for rank in every) if any(self._places) else 0

    @cached_property
    def _places(self) -> Sequence[Mapping[str, Place]]:
        """Where what each rank holds lies; by digests, where one process has one parameter with these values."""
        if self.places is not None:
            return self.places
        begun = _begun(self.alone.ranks[0]) if self.alone.ranks else {}
        often = Counter(begun.values())
        names = {digest: Place(name) for name, digest in begun.items() if often[digest] == 1}
        return [
            {name: names[digest] for name, digest in _begun(rank).items() if digest in names}
            for rank in self.record.ranks
        ]

    @property
    def _are_whole(self) -> bool:
        """Whether the ranks' parts make the model of one process, as far as first values tell parameters apart."""
        if self.places is not None:
            return True
        held = {digest for rank in self.record.ranks for digest in _begun(rank).values()}
        return any(self._places) and {*_begun(self.alone.ranks[0]).values()} == held

    @property
    def _takes_as_many(self) -> bool:
        """Whether one process ends after as many steps, if the ranks have ended."""
        return self.record.is_cut_short or len(self.alone.ranks[0].steps) == self._steps

    def _pairs(self, place: int) -> Iterator[_Pair]:
        theirs = _norms(self.alone.ranks[0], place)
        least = _SMALL * math.hypot(*theirs.values())
        cut: dict[str, dict[tuple[int, ...], float]] = {}
        for rank, places in zip(self.record.ranks, self._places, strict=True):
            for name, mine in _norms(rank, place).items():
                if (at := places.get(name)) is None:
                    continue
                if at.key is None:
                    yield _Pair(rank, name, at.name, mine, theirs.get(at.name, 0.0), least)
                else:
                    cut.setdefault(at.name, {})[at.key if at.is_known else (rank.number,)] = mine
        for name, parts in cut.items():
            mine = math.hypot(*parts.values())
            yield _Pair(self.record.ranks[0], name, name, mine, theirs.get(name, 0.0), least)


def _begun(rank: Rank) -> dict[str, str]:
    """Name -> digest of first values: of what optimizers of torch hold, and of what else is trained."""
    held: dict[str, str] = next((event["parameters"] for event in rank.of("start")), {})
    trained = rank.steps[0]["parameters"] if rank.steps else {}
    return held | {name: begun for name, begun in trained.items() if begun not in held.values()}


def _norms(rank: Rank, place: int) -> dict[str, float]:
    """Name -> norm of a step's gradient; of a second optimizer's parameters by the names that :func:`_begun` has."""
    step = rank.steps[place]
    return {of_optimizer(step["optimizer"], name): norm for name, norm in step["norms"].items()}


def _finding(pair: _Pair, step: Event, rest: int) -> Finding:
    number, times = pair.rank.number, pair.mine / pair.other if pair.other else math.inf
    return Finding(
        code="gradient-differs",
        rank=number,
        step=step["event"],
        tensor=pair.name,
        factor=round(times, 4) if pair.other else None,
        where=pair.rank.backward_of(step),
        cause=f"the gradient of {pair.name}, in the part of the model that rank {number} holds, has {times:.3g} times "
        f"the norm that it has in one process, and those of {rest} other parameters have the same: a parameter that "
        "two parts share has a gradient in each, say, and these are not added up",
        fix="add up the gradients of what two parts share, over the ranks that hold it, before the step",
    )
