"""Which way to use so many ranks is fastest, and how that goes on as they become more.

    ranks     data parallel     pipeline     hybrid        every way is predicted; of each kind the fastest is kept,
      1       one process                                  as long as it fits the devices' memory
      2       2 replicas        2 stages
      4       4                 4            2 x 2
      …       …                 …            2 x 4, 4 x 2

Micro-batches are tried from one a stage to eight, doubling, as `plan_pipeline` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from samestep.errors import UsageError
from samestep.planning import data_parallel, pipeline_parallel
from samestep.planning.fabric import ClusterFabric
from samestep.planning.profile import Profile
from samestep.planning.step import ParallelLayout, PredictedStep
from samestep.text import bytes_text

KINDS = ("data", "pipeline", "hybrid")
MOST_STAGES = 32
MOST_EACH = 8  # micro-batches for each stage
SCHEDULES = ("1f1b", "zero-bubble")


@dataclass(frozen=True)
class ScalingPoint:
    ranks: int
    steps: dict[str, PredictedStep | str]  # by kind, the fastest, or why there is none

    @property
    def best(self) -> PredictedStep | None:
        """The fastest of all kinds, by samples a second."""
        fitting = [one for one in self.steps.values() if isinstance(one, PredictedStep)]
        return max(fitting, key=lambda one: one.rate, default=None)


@dataclass(frozen=True)
class Planner:
    profile: Profile
    fabric: ClusterFabric
    speed: float = 1.0  # of a device, relative to the profiled one
    memory: float = float("inf")  # bytes of a device
    # the batch grows with the ranks: each takes as many samples as the profiled process; else all take those
    # together, and the training is the same
    scale_batch: bool = False
    batch_factor: int = 1  # the batch is so many times that of the profile
    _known: dict[int, ScalingPoint] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def single_process(self) -> PredictedStep:
        """One process on one device, whether it fits there or not."""
        return data_parallel.predict(self.profile, self.fabric, ParallelLayout(1), self.speed, batch=self.samples(1))

    def samples(self, ranks: int) -> int:
        return self.profile.batch * self.batch_factor * (ranks if self.scale_batch else 1)

    def predict(self, ranks: int) -> ScalingPoint:
        if not 1 <= ranks <= self.fabric.ranks:
            raise UsageError(f"{ranks} ranks are asked for, and the cluster has {self.fabric.ranks}: give 1 to that")
        if ranks not in self._known:
            kinds = ("alone",) if ranks == 1 else KINDS
            self._known[ranks] = ScalingPoint(ranks, {kind: self._best(kind, ranks) for kind in kinds})
        return self._known[ranks]

    def curve(self, most: int | None = None) -> list[ScalingPoint]:
        most = self.fabric.ranks if most is None else most
        counts = [1 << bit for bit in range(most.bit_length()) if 1 << bit < most]
        return [self.predict(ranks) for ranks in (*counts, most)]

    def step(self, layout: ParallelLayout) -> PredictedStep:
        """Returns the step of one layout; UsageError where none fits, as of `pipeline_parallel.predict`."""
        batch = self.samples(layout.ranks)
        if layout.stages == 1:
            return data_parallel.predict(self.profile, self.fabric, layout, self.speed, batch=batch)
        return pipeline_parallel.predict(self.profile, self.fabric, layout, self.speed, memory=self.memory, batch=batch)

    @property
    def _layers(self) -> int:
        return min((len(each) for each in self.profile.layers.values()), default=0)

    def layouts(self, kind: str, ranks: int) -> Iterator[ParallelLayout]:
        if kind in ("alone", "data"):
            if self.samples(ranks) >= ranks:
                yield ParallelLayout(ranks)
            return
        for count in (ranks,) if kind == "pipeline" else _divisors(ranks):
            if count <= min(self._layers, MOST_STAGES):
                yield from self._orders(ranks // count, count)

    def _orders(self, copies: int, count: int) -> Iterator[ParallelLayout]:
        parts = count
        while parts <= MOST_EACH * count and parts * copies <= self.samples(copies * count):
            yield from (ParallelLayout(copies, count, parts, name) for name in SCHEDULES)
            parts *= 2

    def _best(self, kind: str, ranks: int) -> PredictedStep | str:
        found: list[PredictedStep] = []
        reason = self._none(kind, ranks)
        for layout in self.layouts(kind, ranks):
            try:
                one = self.step(layout)
            except UsageError as error:
                reason = str(error)
                continue
            if one.memory <= self.memory:
                found.append(one)
            else:
                reason = (
                    f"a device needs {bytes_text(one.memory)}, and has {bytes_text(self.memory)}: "
                    f"{bytes_text(one.memory - self.memory)} too little"
                )
        return max(found, key=lambda one: one.rate, default=None) or reason

    def _none(self, kind: str, ranks: int) -> str:
        if kind in ("alone", "data"):
            return f"a batch of {self.samples(ranks)} samples is smaller than {ranks} ranks"
        if self.profile.uncut:
            return self.profile.uncut
        if kind == "hybrid" and not any(_divisors(ranks)):
            return f"{ranks} ranks are no replicas of several stages"
        return f"{self._layers} layers, and batches of {self.samples(ranks)} samples, are too few for {ranks} ranks"


def _divisors(ranks: int) -> Iterator[int]:
    """Stages of a hybrid: more than one, and more than one replica."""
    return (count for count in range(2, ranks // 2 + 1) if ranks % count == 0)
