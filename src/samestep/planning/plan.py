"""A plan: the curve of a training on a cluster, what to change next, what a person reads and sees, and what it sets.

ranks   data parallel      pipeline        hybrid     fastest                 speed-up   efficiency   limited by
    1         84.7 ms                                 1 process                    1.00        100 %   computing
    2         98.7 ms       54.3 ms             -     2 stages, 2 micro-…          1.56         78 %   computing

Every change is predicted as the plan itself was: its gain is samples a second then over those of now, with as many
ranks. A change is of the set-up, unless it says that the training is another one: then it is told last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from samestep.errors import UsageError
from samestep.network.cluster import Cluster
from samestep.network.routing import ECMP
from samestep.planning import data_parallel
from samestep.planning.fabric import ClusterFabric
from samestep.planning.planner import KINDS, Planner, ScalingPoint
from samestep.planning.profile import Profile
from samestep.planning.settings import Settings
from samestep.planning.step import WORDS, PredictedStep
from samestep.text import bytes_text, seconds_text

MIB = 1 << 20
MIN_GAIN = 0.02  # of the samples a second, below which a change is not suggested
INT8_BITS = 8.125  # of each gradient of 32 bits: its code, and its share of a scale of 32 bits for 256
PASSES = 6  # over each gradient, to encode it and to decode it, each as slow as adding
HALF = 0.5  # efficiency below which ranks are said to cost more than they give
WIDTH = 150  # characters in a line of a title
LEFT, RIGHT = (0.0, 0.38), (0.45, 0.83)  # of the page's width: the plots; what is left is for the second one's legend
TITLES = {"data": "data parallel", "pipeline": "pipeline", "hybrid": "hybrid"}


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
        """The fastest step of all; of several as quick within 1 %, the one with the fewest ranks."""
        return smallest_near_best([one.best for one in self.points])

    @property
    def as_it_is(self) -> PredictedStep | None:
        """Likewise, of those that take no other lines in the script: data parallel, or one process."""
        return smallest_near_best([one.steps.get("alone", one.steps.get("data")) for one in self.points])

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
        yield from table(self.planner, self.points)
        yield ""
        yield from verdict(self.planner, self.points)
        if self.best is not None:
            yield ""
            yield from detail(self.best, self.planner)
            yield ""
            yield from self._advice()

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
            "int8_gain": self.int8_gain,
            "settings": {name: value for name, value in asdict(self.settings()).items() if value is not None},
        }

    @property
    def int8_gain(self) -> float | None:
        """What gradients of 8 bits would give; None where nothing is summed."""
        return None if self.compressed is None or self.best is None else self.compressed.rate / self.best.rate - 1

    def _advice(self) -> Iterator[str]:
        same = [one for one in self.changes if one.same]
        if same:
            yield f"Next: {same[0]} samples a second."
        yield from (f"  or {one}" for one in self.changes if not same or one is not same[0])
        if not self.changes:
            yield "Nothing that was tried would make it faster by 2 % or more."
        if self.int8_gain is not None:
            pays = "pays" if self.int8_gain > MIN_GAIN else "does not pay"
            yield f"Compressing gradients to 8 bits {pays} here: {100 * self.int8_gain:+.0f} %."


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
    found = ordered([*of_setup(planner, used, adding), *_elsewhere(planner, cluster, used)])
    squeezed = compressed(planner, adding).step(draft.best.layout) if draft.best.algorithm else None
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
                yield from gain_of(what, planner, replace(planner, fabric=ClusterFabric(other)), ranks)


def _step_json(one: PredictedStep | str) -> dict[str, Any]:
    return {"unfit": one} if isinstance(one, str) else one.as_json()


# --- what to change ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Suggestion:
    what: str  # to do, in words
    step: PredictedStep  # as it would be then
    gain: float  # samples a second then, over those of now, less 1
    same: bool = True  # whether it stays the same training

    def __str__(self) -> str:
        another = "" if self.same else " (another training)"
        return f"{self.what}: {100 * self.gain:+.0f} %{another}"


def of_setup(planner: Planner, ranks: int, adding_bytes_per_s: float = float("inf")) -> list[Suggestion]:
    """Returns what would help with so many ranks; how fast a rank adds says what encoding takes."""
    others = _others(planner, adding_bytes_per_s)
    return ordered([one for what, other, same in others for one in gain_of(what, planner, other, ranks, same=same)])


def ordered(found: Sequence[Suggestion]) -> list[Suggestion]:
    return sorted(found, key=lambda one: (not one.same, -one.gain))


def gain_of(what: str, planner: Planner, other: Planner, ranks: int, *, same: bool = True) -> Iterator[Suggestion]:
    """Yields the change to another planner, if it is worth while with so many ranks."""
    now, then = planner.predict(ranks).best, other.predict(ranks).best
    if now is not None and then is not None and then.rate > (1 + MIN_GAIN) * now.rate:
        yield Suggestion(what, then, then.rate / now.rate - 1, same)


def compressed(planner: Planner, adding_bytes_per_s: float) -> Planner:
    """Returns the planner with gradients of 8 bits, whose coding costs PASSES of so many bytes a second."""
    coding = PASSES / adding_bytes_per_s
    return replace(planner, fabric=replace(planner.fabric, bytes_scale=INT8_BITS / 32, coding_s=coding))


def _others(planner: Planner, adding: float) -> Iterator[tuple[str, Planner, bool]]:
    fabric = planner.fabric
    yield "load samples beside the step (workers=)", _with(planner, data_s=0.0), True
    yield "a network of twice the bandwidth", _on(planner, bandwidth_scale=2 * fabric.bandwidth_scale), True
    yield "a network of half the latency", _on(planner, latency_scale=fabric.latency_scale / 2), True
    yield "devices twice as fast", replace(planner, speed=2 * planner.speed), True
    if planner.profile.other_s > 0:
        yield "leave out what the script does beside model, data and optimizer", _with(planner, other_s=0.0), True
    yield 'gradients of 8 bits (compress="int8")', compressed(planner, adding), False
    yield "a batch twice as large", replace(planner, batch_factor=2 * planner.batch_factor), False


def _with(planner: Planner, **seconds: Any) -> Planner:
    return replace(planner, profile=replace(planner.profile, **seconds))


def _on(planner: Planner, **scales: Any) -> Planner:
    return replace(planner, fabric=replace(planner.fabric, **scales))


# --- as a person reads it ---------------------------------------------------------------------


def table(planner: Planner, points: Sequence[ScalingPoint]) -> list[str]:
    rows = [("ranks", *TITLES.values(), "fastest", "speed-up", "efficiency", "limited by")]
    rows += [_row(planner, one) for one in points]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{'<' if number in (4, 7) else '>'}{width}" for number, width in enumerate(widths)]  # these are words
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def verdict(planner: Planner, points: Sequence[ScalingPoint]) -> list[str]:
    """Returns sentences: what is fastest, when data parallel is the wrong answer, and when ranks no longer pay."""
    last = points[-1]
    said = []
    if last.best is None:
        reasons = dict.fromkeys(f"{TITLES.get(kind, kind)}: {why}" for kind, why in last.steps.items())
        said = [f"Nothing fits {last.ranks} ranks. {'; '.join(reasons)}."]
    if all(one.best is None for one in points):
        return said
    return [*_fastest(planner, points), *said, *_wrong(planner, last), *_too_many(planner, points)]


def detail(step: PredictedStep, planner: Planner) -> list[str]:
    """Returns what a step goes into, and how to set it up."""
    shares = {name: seconds for name, seconds in step.parts.shares().items() if abs(seconds) >= 0.001 * step.seconds}
    order = sorted(shares, key=lambda name: -shares[name])
    between = f"{seconds_text(step.low)} to {seconds_text(step.high)}"
    lines = [f"{step.layout}: {seconds_text(step.seconds)} a step ({between}), {step.rate:,.0f} samples a second"]
    for name in order:
        percent = round(100 * shares[name] / step.seconds)  # no format, which would show -0
        lines.append(f"  {seconds_text(shares[name]):>9}  {percent:>3} %  {WORDS[name]}")
    if step.algorithm:
        buckets = ", ".join(map(bytes_text, step.buckets))
        hidden = f", {100 * step.hidden:.0f} % of it beside the backward" if step.layout.stages == 1 else ""
        lines.append(f"  all-reduce: {step.algorithm}, buckets of {buckets}{hidden}")
    if step.ends:
        lines.append(f"  stages of layers up to {', '.join(map(str, step.ends))}")
    room = f" of {bytes_text(planner.memory)}" if planner.memory < float("inf") else ""
    lines.append(f"  memory: {bytes_text(step.memory)}{room} on the fullest device, as far as tensors go")
    return lines


def smallest_near_best(steps: Sequence[PredictedStep | str | None]) -> PredictedStep | None:
    """Returns of steps in the order of their ranks the first that is within 1 % of the fastest."""
    found = [one for one in steps if isinstance(one, PredictedStep)]
    most = max((one.rate for one in found), default=0.0)
    return next((one for one in found if one.rate >= 0.99 * most), None)


def speed_up(planner: Planner, step: PredictedStep) -> float:
    return step.rate / planner.single_process.rate


def efficiency(planner: Planner, step: PredictedStep) -> float:
    return speed_up(planner, step) / step.layout.ranks


def _row(planner: Planner, point: ScalingPoint) -> tuple[str, ...]:
    cells = [_time(point.steps.get(kind)) for kind in KINDS]
    best = point.best
    if best is None:
        return (str(point.ranks), *cells, "nothing fits", "", "", "")
    if point.ranks == 1:
        cells[0] = seconds_text(best.seconds)
    shares = f"{speed_up(planner, best):.2f}", f"{100 * efficiency(planner, best):.0f} %"
    return (str(point.ranks), *cells, str(best.layout), *shares, WORDS[best.bottleneck()])


def _time(one: PredictedStep | str | None) -> str:
    return seconds_text(one.seconds) if isinstance(one, PredictedStep) else "" if one is None else "-"


def _fastest(planner: Planner, points: Sequence[ScalingPoint]) -> Iterator[str]:
    found = [one.best for one in points if one.best is not None]
    best = max(found, key=lambda one: one.rate)
    times = speed_up(planner, best)
    yield (
        f"Fastest: {best.layout}, {seconds_text(best.seconds)} a step of {best.samples} samples, {times:.2f} times "
        f"one process, {100 * efficiency(planner, best):.0f} % of {best.layout.ranks} times as much."
    )
    chosen = smallest_near_best(found)
    if chosen is not None and chosen is not best:
        yield (
            f"Within 1 % of that with fewer ranks: {chosen.layout}, {seconds_text(chosen.seconds)} a step; "
            "the details below are of these."
        )


def _wrong(planner: Planner, last: ScalingPoint) -> Iterator[str]:
    """When data parallel is no answer, or another way is a better one."""
    data, best = last.steps.get("data"), last.best
    if isinstance(data, str) and last.ranks > 1 and best is not None:
        yield f"Data parallel training on {last.ranks} ranks is not possible: {data}."
    elif isinstance(data, PredictedStep) and data.rate < planner.single_process.rate:
        yield (
            f"Data parallel training is the wrong answer here: {data.layout} give {data.rate:,.0f} samples a second, "
            f"one process {planner.single_process.rate:,.0f}; what they lose is {WORDS[data.bottleneck()]}."
        )
    elif isinstance(data, PredictedStep) and best is not None and best.rate > 1.1 * data.rate:
        yield (
            f"Data parallel training alone is not the best answer: {best.layout} give {best.rate / data.rate:.2f} "
            f"times as many samples a second on the same {last.ranks} ranks."
        )


def _too_many(planner: Planner, points: Sequence[ScalingPoint]) -> Iterator[str]:
    """From how many ranks on more give nothing, or less than they cost."""
    found = [one.best for one in points if one.best is not None]
    peak = max(found, key=lambda one: one.rate)
    if peak is not found[-1]:
        yield (
            f"More than {peak.layout.ranks} ranks make it slower: {found[-1].layout.ranks} give {found[-1].rate:,.0f} "
            f"samples a second, {peak.layout.ranks} give {peak.rate:,.0f}."
        )
    paying = [one for one in found if efficiency(planner, one) >= HALF]
    if paying and paying[-1] is not found[-1] and paying[-1].layout.ranks < peak.layout.ranks:
        yield f"Beyond {paying[-1].layout.ranks} ranks, each gives less than half of what one process does."


# --- as a picture -----------------------------------------------------------------------------


def draw(plan: TrainingPlan, file: Path) -> None:
    """Draws how the samples a second grow with the ranks, and what a step goes into; the page needs no network."""
    from plotly.subplots import make_subplots

    titles = ("samples a second", "what a step of the fastest way goes into, ms")
    figure: Any = make_subplots(rows=1, cols=2, subplot_titles=titles)
    _curves(figure, plan)
    _parts(figure, plan)
    title = [part for line in plan.title().splitlines() for part in wrap(line, WIDTH)]
    figure.update_layout(
        title={"text": "<br>".join(title), "font": {"size": 14}},
        margin={"t": 80 + 20 * len(title)},
        barmode="relative",  # a part below 0 lies under the others
        template="plotly_white",
        legend={"x": 0.01, "y": 0.99},
        legend2={"x": RIGHT[1] + 0.01, "y": 1.0},
    )
    figure.update_xaxes(title="ranks", type="log", dtick=0.30103, domain=LEFT, row=1, col=1)
    figure.update_yaxes(type="log", dtick="D2", row=1, col=1)
    figure.update_xaxes(title="ranks", type="category", domain=RIGHT, row=1, col=2)
    for words, plot in zip(figure.layout.annotations, (LEFT, RIGHT), strict=True):
        words.x = sum(plot) / 2
    figure.write_html(file, include_plotlyjs=True, default_height="96vh")


def _curves(figure: Any, plan: TrainingPlan) -> None:
    ranks = [one.ranks for one in plan.points]
    alone = plan.planner.single_process.rate
    ideal = [alone * n for n in ranks]
    figure.add_scatter(name="as many times one process", x=ranks, y=ideal, line={"dash": "dot"}, row=1, col=1)
    for kind in KINDS:
        found = [one for point in plan.points if isinstance(one := point.steps.get(kind), PredictedStep)]
        if found:
            rates, layouts = [one.rate for one in found], [str(one.layout) for one in found]
            x = [one.layout.ranks for one in found]
            figure.add_scatter(name=TITLES[kind], x=x, y=rates, text=layouts, row=1, col=1)


def _parts(figure: Any, plan: TrainingPlan) -> None:
    best = [(one.ranks, one.best) for one in plan.points if one.best is not None]
    for name, words in WORDS.items():
        values = [1e3 * one.parts.shares()[name] for _, one in best]
        if any(values):
            figure.add_bar(name=words, x=[str(n) for n, _ in best], y=values, legend="legend2", row=1, col=2)
