"""What a pipeline's steps took, beside what was predicted, and where the time went.

    work          what the stages computed, evenly shared among the ranks: nothing is quicker
    bubble        what the schedule costs where all stages are alike
    imbalance     what it costs besides that they are not, nor one micro-batch like the other
    messages      what the step took longer than that
    tail          after the last backward: gradients of the replicas, the loss told to all

The first three are simulations with the times that the step's actions took, each with one thing more, so all add up to
the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from samestep.errors import StepError
from samestep.pipelines.picture import draw
from samestep.pipelines.stopwatch import Timed
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.world import World
from samestep.schedule.plan import Action, Schedule
from samestep.schedule.simulate import Costs, Span, Timeline, simulate

__all__ = ["PipelineReport"]

PARTS = ("work", "bubble", "imbalance", "messages", "tail")


@dataclass(frozen=True)
class Foreseen:
    """What a plan was made with.

    Attributes:
        samples: of a batch.
        micro_batches: that it is cut into.
        costs: of the stages, for one of them.
    """

    samples: int
    micro_batches: int
    costs: Costs


@dataclass(frozen=True)
class PipelineReport:
    """What the last steps of a pipeline took; made by :meth:`samestep.Pipeline.report`.

    Attributes:
        steps: how many were looked at: of the last ones those whose batch had the usual number of samples.
        samples: of such a batch, on one replica.
        seconds: of the step that took the median.
        predicted: likewise, by the plan, without the tail; None where there was none, or batches had another size.
        parts: its seconds by what they went to: "work", "bubble", "imbalance", "messages", "tail".
        stages: by stage, the medians over all steps of the seconds of forward, and of both halves of the backward of a
            micro-batch; where a backward is one, all of it stands in the last.
        timeline: of that step.
        foretold: the timeline that the plan predicts, or None.
    """

    steps: int
    samples: int
    seconds: float
    predicted: float | None
    parts: dict[str, float]
    stages: tuple[tuple[float, float, float], ...]
    timeline: Timeline = field(repr=False)
    foretold: Timeline | None = field(repr=False)

    def __str__(self) -> str:
        """The report for people."""
        plan = self.timeline.plan
        what = f"{plan.name}, {plan.stages} stages, {self.samples} samples in {plan.micro_batches} micro-batches"
        lines = [f"{what}; {self.steps} steps"]
        lines.append(f"  {'a step':<12}{1e3 * self.seconds:9.2f} ms")
        for name, seconds in self.parts.items():
            lines.append(f"    {name:<10}{1e3 * seconds:9.2f} ms  {100 * seconds / self.seconds:3.0f} %")
        if self.predicted is not None:
            achieved = self.seconds - self.parts["tail"]
            lines.append(
                f"  {'predicted':<12}{1e3 * self.predicted:9.2f} ms  without tail; it took "
                f"{100 * (achieved / self.predicted - 1):+.1f} %"
            )
        for number, (forward, inputs, weights) in enumerate(self.stages):
            lines.append(
                f"  stage {number:<6}{1e3 * forward:9.2f} ms forward, {1e3 * (inputs + weights):.2f} ms backward"
            )
        return "\n".join(lines)

    def gantt(self, file: str | Path) -> None:
        """Draws the step, and above it the one that was predicted: in a page that needs no network, or as an image.

        Args:
            file: where; its name ends in ".html" or ".png".

        Raises:
            UsageError: it ends otherwise, or plotly, for a page, or Pillow, for an image, is not installed.
        """
        pictures = {"predicted": self.foretold, "achieved": self.timeline}
        draw({name: timeline for name, timeline in pictures.items() if timeline is not None}, self.parts, Path(file))


def reported(world: World, own: Sequence[Timed], foreseen: Foreseen | None) -> PipelineReport:
    """Returns the report, on every rank. Collective over the pipeline.

    Args:
        world: whose pipeline took the steps.
        own: this rank's steps.
        foreseen: what the plan was made with; None where there was none.

    Raises:
        StepError: no step was taken.
    """
    if not own:
        raise StepError("report() tells of steps, and none was taken: call it after step()")
    samples = Counter(each.samples for each in own).most_common(1)[0][0]
    steps = [each for each in own if each.samples == samples]
    plan = steps[0].plan
    told = all_gather_json(world.pipeline, [_as_json(each) for each in steps])
    one_host = world.local_size == world.size
    whole = [_seconds(ranks, one_host=one_host) for ranks in zip(*told, strict=True)]
    place = sorted(range(len(whole)), key=whole.__getitem__)[len(whole) // 2]
    timeline = _joined(plan, [ranks[place] for ranks in told], one_host=one_host)
    measured = _costs(plan, told)
    fits = foreseen is not None and (foreseen.samples, foreseen.micro_batches) == (samples, plan.micro_batches)
    predicted = simulate(plan, foreseen.costs) if foreseen is not None and fits else None
    return PipelineReport(
        steps=len(steps),
        samples=samples,
        seconds=whole[place],
        predicted=None if predicted is None else predicted.seconds,
        parts=_parts(timeline, whole[place]),
        stages=tuple(zip(measured.forward, measured.inputs, measured.weights, strict=True)),
        timeline=timeline,
        foretold=predicted,
    )


def _as_json(step: Timed) -> dict[str, Any]:
    spans = [[*action, begin, end] for action, begin, end in step.spans]
    return {"began": step.began, "seconds": step.seconds, "spans": spans}


def _seconds(ranks: Sequence[dict[str, Any]], *, one_host: bool) -> float:
    """Returns what a step took, from the begin of the first rank to the end of the last where they share a clock."""
    if not one_host:
        return float(max(each["seconds"] for each in ranks))
    return float(max(each["began"] + each["seconds"] for each in ranks) - min(each["began"] for each in ranks))


def _joined(plan: Schedule, ranks: Sequence[dict[str, Any]], *, one_host: bool) -> Timeline:
    """Returns the ranks' actions on one clock: the host's, or where they have several that of the steps' begins."""
    first = min(each["began"] for each in ranks)
    spans = []
    for each in ranks:
        late = each["began"] - first if one_host else 0.0
        spans += [
            Span(plan.placement[stage], Action(kind, stage, micro_batch), late + begin, late + end)
            for kind, stage, micro_batch, begin, end in each["spans"]
        ]
    return Timeline(plan, tuple(sorted(spans, key=lambda span: span.begin)))


def _costs(plan: Schedule, told: Sequence[Sequence[dict[str, Any]]]) -> Costs:
    """Returns the medians of what the actions took."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for steps in told:
        for step in steps:
            for kind, stage, _, begin, end in step["spans"]:
                found[kind, stage].append(end - begin)
    times = {key: median(each) for key, each in found.items()}

    def of(kind: str) -> list[float]:
        return [times.get((kind, stage), 0.0) for stage in range(plan.stages)]

    return Costs(of("F"), of("I"), [whole + half for whole, half in zip(of("B"), of("W"), strict=True)])


@dataclass(frozen=True)
class _Taken(Costs):
    """What each action of one step took, which is another time for each micro-batch."""

    each: Mapping[Action, float] = field(default_factory=dict)

    def of(self, action: Action) -> float:
        """Returns the seconds of an action."""
        return self.each[action]


def _parts(timeline: Timeline, seconds: float) -> dict[str, float]:
    """Returns where a step's time went."""
    plan = timeline.plan
    each = {span.action: span.end - span.begin for span in timeline.spans}

    def even(kind: str) -> tuple[float, ...]:
        found = [took for action, took in each.items() if action.kind == kind]
        return (sum(found) / (plan.stages * plan.micro_batches),) * plan.stages

    nothing = (0.0,) * plan.stages
    weights = tuple(whole + half for whole, half in zip(even("B"), even("W"), strict=True))
    stations = [
        sum(each.values()) / plan.ranks,
        simulate(plan, Costs(even("F"), even("I"), weights)).seconds,
        simulate(plan, _Taken(nothing, nothing, nothing, each=each)).seconds,
        timeline.seconds,
        seconds,
    ]
    return {name: after - before for name, before, after in zip(PARTS, [0.0, *stations[:-1]], stations, strict=True)}
