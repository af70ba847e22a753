"""Steps of a pipeline as they were: what each rank did when, and how much of the time it did nothing.

rank 0    F0 F1 ·· ·· B0 B1        idle: the part of all ranks' time between a step's first begin and its last end
rank 1    ·· F0 F1 B0 B1 ··              in which a rank does none of its actions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from samestep.reporting.record import Event, RankLog
from samestep.reporting.table import measured

__all__: list[str] = []

MOST = 12  # steps that are drawn
MOST_ACTIONS = 2_000  # of a rank in a step
_LONGEST = 1e9  # seconds; more is no measurement


@dataclass(frozen=True)
class Box:
    """An action: its kind ("F", "B", "I", "W"), stage, micro-batch, and seconds from the step's begin."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Gantt:
    """A step."""

    step: int
    schedule: str
    stages: int
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def seconds(self) -> float:
        """From the first action's begin to the last one's end."""
        return max(box.end for box in self.boxes) - min(box.begin for box in self.boxes)

    @property
    def idle(self) -> float:
        """What share of the ranks' time they had nothing to do."""
        worked = sum(box.end - box.begin for box in self.boxes)
        whole = len(self.ranks) * self.seconds
        return max(0.0, 1 - worked / whole) if whole else 0.0

    @property
    def micro_batches(self) -> int:
        """How many the step was cut into."""
        return len({box.micro_batch for box in self.boxes})


def gantts(logs: Sequence[RankLog]) -> list[Gantt]:
    """Returns the steps that all ranks with a stage have noted: the first ones, the last, and some between."""
    staged = [log for log in logs if log.pipelines]
    if not staged:
        return []
    lines = {log.rank: {line["step"]: line for line in log.pipelines if line["actions"]} for log in staged}
    common = sorted(set.intersection(*(set(each) for each in lines.values())))
    chosen = common if len(common) <= MOST else common[:3] + common[3 :: -(-(len(common) - 3) // (MOST - 4))]
    if common and common[-1] not in chosen:
        chosen.append(common[-1])
    return [_gantt(step, staged, lines) for step in chosen]


def idle(steps: Sequence[Gantt]) -> float:
    """Returns the share of the ranks' time without work, without the first step where there are more."""
    return fmean(step.idle for step in steps[1:] or steps)


def _gantt(step: int, logs: Sequence[RankLog], lines: dict[int, dict[int, Event]]) -> Gantt:
    events = [(log, lines[log.rank][step]) for log in logs]
    zero = min(line["t"] - log.ahead for log, line in events)
    boxes = [
        Box(log.rank, kind, int(stage), int(micro), begin + shift, max(begin, end) + shift)
        for log, line in events
        for shift in [measured(line["t"] - log.ahead - zero)]
        for kind, stage, micro, begin, end in line["actions"][:MOST_ACTIONS]
        if abs(stage) + abs(micro) + abs(begin) + abs(end) < _LONGEST
    ]
    _, first = events[0]
    ranks = tuple(log.rank for log in logs)
    boxes = boxes or [Box(ranks[0], "F", 0, 0, 0.0, 0.0)]
    return Gantt(step, first["schedule"], first["stages"], ranks, tuple(boxes))
