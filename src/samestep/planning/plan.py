"""A plan: the curve of a training on a cluster, what is said of it, what it sets, and its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from samestep.errors import UsageError
from samestep.network.cluster import Cluster
from samestep.network.routing import ECMP
from samestep.planning import data_parallel, plan_text, suggestions
from samestep.planning.fabric import ClusterFabric
from samestep.planning.planner import Planner, ScalingPoint
from samestep.planning.profile import Profile
from samestep.planning.settings import Settings
from samestep.planning.step import PredictedStep
from samestep.planning.suggestions import Suggestion
from samestep.text import seconds_text

__all__: list[str] = []

MIB = 1 << 20


@dataclass(frozen=True)
class TrainingPlan:
    profile: Profile
    cluster: Cluster  # that it was planned for
    planner: Planner
    points: tuple[ScalingPoint, ...]  # of 1, 2, 4, … ranks
    changes: tuple[Suggestion, ...]  # that would help with as many ranks as are best
    # the step of the best ranks with gradients of 8 bits; None where nothing is summed
    compressed: PredictedStep | None

    @property
    def best(self) -> PredictedStep | None:
        """The fastest step of all; of several as quick within 1 %, the one with the smallest_near_best ranks."""
        return plan_text.smallest_near_best([one.best for one in self.points])

    @property
    def as_it_is(self) -> PredictedStep | None:
        """Likewise, of those that take no other lines in the script: data parallel, or one process."""
        return plan_text.smallest_near_best([one.steps.get("alone", one.steps.get("data")) for one in self.points])

    def title(self, best: PredictedStep | None = None) -> str:
        best = best or self.best
        if best is None:
            return f"{self.profile.script} on {self.cluster}\nnothing fits"
        hosts = -(-best.layout.ranks // self.cluster.devices)
        where = "1 host" if hosts == 1 else f"{hosts} hosts"
        what = f"{best.layout} on {where}: {seconds_text(best.seconds)} a step predicted"
        return f"{self.profile.script} on {self.cluster}\n{what}"

    def lines(self) -> Iterator[str]:
        profile = self.profile
        yield (
            f"{profile.script}: a step of {profile.batch} samples takes {seconds_text(profile.step_s)} "
            f"on {profile.machine} ({profile.steps} steps)"
        )
        yield f"cluster: {self.cluster}"
        yield ""
        yield from plan_text.table(self.planner, self.points)
        yield ""
        yield from plan_text.verdict(self.planner, self.points)
        if self.best is not None:
            yield ""
            yield from plan_text.detail(self.best, self.planner)
            yield ""
            yield from self._advice(self.best)

    def settings(self) -> Settings:
        """Returns what a run takes of it, for the script as it is."""
        best = self.as_it_is
        if best is None:
            return Settings()
        even = best.layout.ranks < self.cluster.devices or best.layout.ranks % self.cluster.devices == 0
        each = min(best.layout.ranks, self.cluster.devices) if even else None  # uneven hosts have slots of their own
        if not best.algorithm:
            return Settings(processes=each)
        share = data_parallel.compute_time(self.profile, -(-best.samples // best.layout.replicas), self.planner.speed)
        cap = data_parallel.best_cap(self.profile, self.planner.fabric, best.layout, share.backward_s, best.algorithm)
        return Settings(processes=each, buckets=float(f"{cap / MIB:.3g}"))

    def as_json(self) -> dict[str, Any]:
        return {
            "script": self.profile.script,
            "cluster": str(self.cluster),
            "ranks": self.cluster.ranks,
            "alone_s": self.planner.single_process.seconds,
            "points": [
                {"ranks": point.ranks, **{kind: _step_json(one) for kind, one in point.steps.items()}}
                for point in self.points
            ],
            "best": None if self.best is None else _step_json(self.best),
            "changes": [{"what": one.what, "gain": one.gain, "same_training": one.same} for one in self.changes],
            "int8_gain": None if self.compressed is None or self.best is None else self._gain(self.best),
            "settings": {name: value for name, value in asdict(self.settings()).items() if value is not None},
        }

    def _gain(self, best: PredictedStep) -> float:
        assert self.compressed is not None
        return self.compressed.rate / best.rate - 1

    def _advice(self, best: PredictedStep) -> Iterator[str]:
        same = [one for one in self.changes if one.same]
        if same:
            yield f"Next: {same[0]} samples a second."
        yield from (f"  or {one}" for one in self.changes if not same or one is not same[0])
        if not self.changes:
            yield "Nothing that was tried would make it faster by 2 % or more."
        if self.compressed is not None:
            gain = self._gain(best)
            pays = "pays" if gain > suggestions.MIN_GAIN else "does not pay"
            yield f"Compressing gradients to 8 bits {pays} here: {100 * gain:+.0f} %."


def make_plan(profile: Profile, cluster: Cluster, ranks: int, *, scale_batch: bool = False) -> TrainingPlan:
    """Returns the plan of a training on up to `ranks` ranks.

    With `scale_batch` every process takes as many samples as the profiled one.
    """
    planner = Planner(profile, ClusterFabric(cluster), cluster.speed, cluster.memory, scale_batch)
    points = tuple(planner.curve(ranks))
    draft = TrainingPlan(profile, cluster, planner, points, (), None)
    if draft.best is None:
        return draft
    used, adding = draft.best.layout.ranks, cluster.links.adding_bytes_per_s
    found = suggestions.ordered([*suggestions.of_setup(planner, used, adding), *_elsewhere(planner, cluster, used)])
    squeezed = suggestions.compressed(planner, adding).step(draft.best.layout) if draft.best.algorithm else None
    return TrainingPlan(profile, cluster, planner, points, tuple(found), squeezed)


def _elsewhere(planner: Planner, cluster: Cluster, ranks: int) -> Iterator[Suggestion]:
    """Yields other orders of the ranks, and other ways of messages, that would help on this network."""
    if cluster.is_flat:
        return
    others = [(f'placement = "{name}"', replace(cluster, placement=name)) for name in ("linear", "circuit")]
    others.append(('routing = "ecmp"', replace(cluster, routing=ECMP)))
    for what, other in others:
        if other != cluster:
            with suppress(UsageError):  # not every network has a circuit
                yield from suggestions.gain_of(what, planner, replace(planner, fabric=ClusterFabric(other)), ranks)


def _step_json(one: PredictedStep | str) -> dict[str, Any]:
    return {"unfit": one} if isinstance(one, str) else one.as_json()
