"""What a pipeline's steps took, beside what was predicted, and where the time went.

    work          what the stages computed, evenly shared among the ranks: nothing is faster
    bubble        what the schedule costs where all stages are equal
    imbalance     what unequal stages and micro-batches cost besides
    messages      what the step took longer than that
    tail          after the last backward: gradients of the replicas, the loss sent to all

The first three are simulations with the times that the step's actions took, each with one thing more, so all add up to
the step.

On the CPU a time is the host's. On a GPU it is an event in the stream, which costs no waiting, and is read when
somebody asks. Events of two GPUs cannot be compared, so the GPUs of one process begin a step together; what the host
computes beside a GPU is placed as if the GPU had begun when it did.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from samestep import events, progress
from samestep.errors import StepError
from samestep.pipelines.devices import sync_streams
from samestep.pipelines.gantt import draw
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.world import World
from samestep.schedule.schedule import Action, Schedule
from samestep.schedule.simulate import Costs, Span, Timeline, breakdown, simulate

__all__ = ["PipelineReport"]

PARTS = ("work", "bubble", "imbalance", "messages", "tail")
STEPS_KEPT = 50
FIRST_EVENTS = 3  # steps that are all among the run's events
# the schedule of a step, the samples of its batch, and as JSON: "began", on the host's clock; "seconds", with what all
# ranks do after the last backward; "spans": actions with begin and end in seconds from its begin
StepTiming = tuple[Schedule, int, dict[str, Any]]


@dataclass
class _Step:
    """One step; times are seconds of the host's clock, or events of a GPU."""

    schedule: Schedule
    samples: int  # of the replica's batch
    began: float
    starts: Mapping[torch.device, Any]  # by device, the step's begin
    spans: list[tuple[Action, Any, Any]] = field(default_factory=list)  # with begin and end
    ended: float = 0.0  # with what all ranks do after the last backward


class StepTimer:
    """Records when each stage of this rank computed which micro-batch, in the last steps."""

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        self._devices = devices
        self._gpus = [device for device in dict.fromkeys(devices.values()) if device.type == "cuda"]
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._taken = 0

    @contextmanager
    def step(self, schedule: Schedule, samples: int) -> Iterator[None]:
        """Records a step, if it does not fail."""
        if len(self._gpus) > 1:
            sync_streams(self._gpus)
        starts = {device: _now(device) for device in dict.fromkeys(self._devices.values())}
        step = _Step(schedule, samples, time.monotonic(), starts)
        self._steps.append(step)
        try:
            yield
            step.ended = time.monotonic()
            self._write_event(step)
        except BaseException:
            self._steps.pop()
            raise

    def _write_event(self, step: _Step) -> None:
        """Writes a step to the run's events: each of the first ones, later now and then; none on GPUs."""
        self._taken += 1
        if self._gpus or not events.is_attached() or (self._taken > FIRST_EVENTS and self._taken % STEPS_KEPT):
            return
        actions = [
            [*action, round(begin - step.began, 6), round(end - step.began, 6)] for action, begin, end in step.spans
        ]
        fields = {"schedule": step.schedule.name, "stages": step.schedule.stages, "actions": actions}
        events.note("pipeline", progress.finished_steps() + 1, step.began, **fields)

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        device = self._devices[action.stage]
        begin = _now(device)
        yield
        self._steps[-1].spans.append((action, begin, _now(device)))

    def timings(self) -> list[StepTiming]:
        """Returns the steps, oldest first; waits for the last on a GPU."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        return [(step.schedule, step.samples, self._times(step)) for step in self._steps]

    def _times(self, step: _Step) -> dict[str, Any]:
        def since_start(action: Action, at: Any) -> float:
            device = self._devices[action.stage]
            start = step.starts[device]
            return float(start.elapsed_time(at)) / 1e3 if device.type == "cuda" else float(at - start)

        spans = [[*one, since_start(one, begin), since_start(one, end)] for one, begin, end in step.spans]
        return {"began": step.began, "seconds": step.ended - step.began, "spans": spans}


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True)
class Prediction:
    """What a plan was made with: samples of a batch, its micro-batches, and the costs of the stages for one of them."""

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
        stages: by stage, the medians over all steps of the seconds of forward, and of both parts of the backward of a
            micro-batch; where a backward is one, all of it is in the last.
        timeline: of that step.
        predicted_timeline: the timeline that the plan predicts, or None.
    """

    steps: int
    samples: int
    seconds: float
    predicted: float | None
    parts: dict[str, float]
    stages: tuple[tuple[float, float, float], ...]
    timeline: Timeline = field(repr=False)
    predicted_timeline: Timeline | None = field(repr=False)

    def __str__(self) -> str:
        """The report for people."""
        schedule = self.timeline.schedule
        batch = f"{self.samples} samples in {schedule.micro_batches} micro-batches"
        lines = [
            f"{schedule.name}, {schedule.stages} stages, {batch}; {self.steps} steps",
            f"  {'a step':<12}{1e3 * self.seconds:9.2f} ms",
        ]
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
        steps = {"predicted": self.predicted_timeline, "achieved": self.timeline}
        draw({name: timeline for name, timeline in steps.items() if timeline is not None}, self.parts, Path(file))


def make_report(world: World, own: Sequence[StepTiming], prediction: Prediction | None) -> PipelineReport:
    """Returns the report, on every rank. Collective over the pipeline."""
    if not own:
        raise StepError("report() tells of steps, and none was taken: call it after step()")
    samples = Counter(size for _, size, _ in own).most_common(1)[0][0]
    steps = [(schedule, times) for schedule, size, times in own if size == samples]
    schedule = steps[0][0]
    by_rank = all_gather_json(world.pipeline, [times for _, times in steps])
    if world.local_size != world.size:  # hosts share no clock: all ranks are taken to begin at once
        for times in itertools.chain(*by_rank):
            times["began"] = 0.0
    seconds = [
        float(max(each["began"] + each["seconds"] for each in ranks) - min(each["began"] for each in ranks))
        for ranks in zip(*by_rank, strict=True)
    ]
    middle = sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2]
    timeline = _merge(schedule, [ranks[middle] for ranks in by_rank])
    predicted = None
    if prediction is not None and (prediction.samples, prediction.micro_batches) == (samples, schedule.micro_batches):
        predicted = simulate(schedule, prediction.costs)
    return PipelineReport(
        steps=len(steps),
        samples=samples,
        seconds=seconds[middle],
        predicted=None if predicted is None else predicted.seconds,
        parts=_parts(timeline, seconds[middle]),
        stages=_stage_medians(schedule, by_rank),
        timeline=timeline,
        predicted_timeline=predicted,
    )


def _merge(schedule: Schedule, ranks: Sequence[dict[str, Any]]) -> Timeline:
    """Returns the ranks' actions on one clock."""
    first = min(each["began"] for each in ranks)
    spans = []
    for each in ranks:
        late = each["began"] - first
        spans += [
            Span(schedule.placement[stage], Action(kind, stage, micro_batch), late + begin, late + end)
            for kind, stage, micro_batch, begin, end in each["spans"]
        ]
    return Timeline(schedule, tuple(sorted(spans, key=lambda span: span.begin)))


def _stage_medians(
    schedule: Schedule, by_rank: Sequence[Sequence[dict[str, Any]]]
) -> tuple[tuple[float, float, float], ...]:
    """Returns by stage the medians of forward, input backward, and whole or weight backward."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for steps in by_rank:
        for step in steps:
            for kind, stage, _, begin, end in step["spans"]:
                found[kind, stage].append(end - begin)

    def of(kind: str, stage: int) -> float:
        return median(found[kind, stage] or [0.0])

    return tuple((of("F", one), of("I", one), of("B", one) + of("W", one)) for one in range(schedule.stages))


def _parts(timeline: Timeline, seconds: float) -> dict[str, float]:
    durations = {span.action: span.end - span.begin for span in timeline.spans}
    zeros = (0.0,) * timeline.schedule.stages  # messages take no time; the actions' are measured
    parts = breakdown(timeline.schedule, Costs(zeros, zeros, zeros), durations)
    parts["messages"] = timeline.seconds - sum(parts.values())
    return {**parts, "tail": seconds - timeline.seconds}
