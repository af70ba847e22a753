"""When each stage of this rank computed which micro-batch, in the last steps: what a report is made of.

On the CPU a time is the host's. On a GPU it is an event in the stream, which costs no waiting, and is looked up when
somebody asks. Events of two GPUs cannot be compared, so those of one process begin a step together; beside a GPU, what
the host computes is placed as if the GPU had begun when it did.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from samestep import events, progress
from samestep.pipelines.streams import meet
from samestep.schedule.plan import Action, Schedule

__all__: list[str] = []

KEPT = 50  # steps
DRAWN = 3  # first steps that are all among the run's events


@dataclass
class _Step:
    """One step; times are seconds of the host's clock, or events."""

    plan: Schedule
    samples: int
    began: float
    first: Mapping[torch.device, Any]
    spans: list[tuple[Action, Any, Any]] = field(default_factory=list)
    ended: float = 0.0


@dataclass(frozen=True)
class Timed:
    """One step of this rank.

    Attributes:
        plan: that it followed.
        samples: of the replica's batch.
        began: when, in seconds of the host's clock.
        seconds: of the whole step, with what all ranks do after the last backward.
        spans: the actions, with begin and end in seconds after the step's begin.
    """

    plan: Schedule
    samples: int
    began: float
    seconds: float
    spans: tuple[tuple[Action, float, float], ...]


class Stopwatch:
    """Notes the last steps of one rank.

    Args:
        devices: that compute, by stage.
    """

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        self._devices = devices
        self._cards = [device for device in dict.fromkeys(devices.values()) if device.type == "cuda"]
        self._steps: deque[_Step] = deque(maxlen=KEPT)
        self._taken = 0

    @contextmanager
    def step(self, plan: Schedule, samples: int) -> Iterator[None]:
        """Notes a step, if it comes to its end."""
        step = _Step(plan, samples, time.monotonic(), self._begun())
        self._steps.append(step)
        try:
            yield
            step.ended = time.monotonic()
            self._note(step)
        except BaseException:
            self._steps.pop()
            raise

    def _note(self, step: _Step) -> None:
        """Writes a step down among the run's events: of the first ones each, later now and then; on GPUs none."""
        self._taken += 1
        if self._cards or not events.is_attached() or (self._taken > DRAWN and self._taken % KEPT):
            return
        actions = [
            [*action, round(begin - step.began, 6), round(end - step.began, 6)] for action, begin, end in step.spans
        ]
        fields = {"schedule": step.plan.name, "stages": step.plan.stages, "actions": actions}
        events.note("pipeline", progress.finished_steps() + 1, step.began, **fields)

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Notes an action of the step."""
        device = self._devices[action.stage]
        begin = _now(device)
        yield
        self._steps[-1].spans.append((action, begin, _now(device)))

    def _begun(self) -> dict[torch.device, Any]:
        if len(self._cards) > 1:
            meet(self._cards)
        return {device: _now(device) for device in dict.fromkeys(self._devices.values())}

    def steps(self) -> list[Timed]:
        """Returns the steps, oldest first; on a GPU it waits for the last."""
        for card in self._cards:
            torch.cuda.synchronize(card)
        return [self._timed(step) for step in self._steps]

    def _timed(self, step: _Step) -> Timed:
        def after(action: Action, mark: Any) -> float:
            device = self._devices[action.stage]
            first = step.first[device]
            return float(first.elapsed_time(mark)) / 1e3 if device.type == "cuda" else float(mark - first)

        spans = tuple((action, after(action, begin), after(action, end)) for action, begin, end in step.spans)
        return Timed(step.plan, step.samples, step.began, step.ended - step.began, spans)


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
