"""The data ledger: which rank had how much of the steps' work, and what it costs if that is uneven.

In each step the ranks that had more of it are compared with those that had less: how much longer did they compute?
A line through all of these differences is what a unit of work costs. A step ends with the rank that has most, so

    cost of a step  =  seconds of a unit, times what the rank that has most has beyond the mean of the ranks

and nothing, unless the times do follow the work: ranks may be slow for other reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from samestep.reporting.run_log import Event, RankLog, measured
from samestep.reporting.steps import Floats, StepTable, valid_steps

FOLLOWS = 0.5  # of the variance of the times is explained by the work
FEWEST = 10  # steps of which that can be said

Unit = Literal["samples", "weight", "elements"]


@dataclass(frozen=True)
class Share:
    """What one rank had of a step, in the mean."""

    rank: int
    samples: float  # 0 without samestep's loader
    weight: float  # without samestep's loader the numbers in its batches
    least: float  # weight of a step
    most: float  # likewise
    epoch: int  # the last


@dataclass(frozen=True)
class Ledger:
    shares: tuple[Share, ...]  # by rank
    unit: Unit  # what the imbalance is of
    # by how much the rank that has most of a step has more than the mean, in the mean of the steps; None where not all
    # ranks tell it of the same steps
    imbalance: float | None
    follows: float | None  # how much of the ranks' differences in time the work explains, None where nothing differs
    cost: float  # seconds of a step that an even division would save


def ledger(table: StepTable, logs: Sequence[RankLog]) -> Ledger | None:
    """Returns what the ranks had to do; None where nothing shows it.

    A script with a loader of its own shows how many numbers were in its batches, and no more.
    """
    lines = {log.rank: found for log in logs if (found := _lines(log))}
    if not lines:
        return None
    shares = tuple(_share(rank, list(each.values())) for rank, each in sorted(lines.items()))
    steady = table.steady
    known = [step in each for each in (lines.get(rank, {}) for rank in steady.ranks) for step in steady.steps.tolist()]
    common: NDArray[Any] = np.array(known, dtype=bool).reshape(len(steady.ranks), len(steady))
    steady = steady.columns(np.flatnonzero(common.all(axis=0)))
    unit = _unit(lines)
    if len(steady.ranks) < 2 or not len(steady):
        return Ledger(shares, unit, 0.0 if len(logs) < 2 else None, None, 0.0)
    work = np.array([[measured(lines[rank][step].get(unit, 0)) for step in steady.steps] for rank in steady.ranks])
    return Ledger(shares, unit, *_uneven(work, steady))


def _unit(lines: Mapping[int, Mapping[int, Event]]) -> Unit:
    """What is told of the work, and says most of it."""
    every = [line for each in lines.values() for line in each.values()]
    if not any("samples" in line for line in every):
        return "elements"
    return "weight" if any(line.get("weight") != line.get("samples") for line in every) else "samples"


def _uneven(work: Floats, table: StepTable) -> tuple[float, float | None, float]:
    beyond = work - work.mean(axis=0)
    mean = table.mean(work.mean(axis=0))
    imbalance = table.mean(beyond.max(axis=0)) / mean if mean else 0.0
    own = table.own - table.own.mean(axis=0)
    variance = float((beyond**2).sum())
    if not variance or not float((own**2).sum()):
        return imbalance, None, 0.0
    together = float((beyond * own).sum())
    follows = together**2 / (variance * float((own**2).sum()))
    if together <= 0 or follows < FOLLOWS or len(table) < FEWEST:
        return imbalance, follows if together > 0 else 0.0, 0.0
    return imbalance, follows, together / variance * table.mean(beyond.max(axis=0))


def _lines(log: RankLog) -> dict[int, Event]:
    return {step: line["work"] for step, line in valid_steps(log.steps).items() if line["work"]}


def _share(rank: int, lines: Sequence[Event]) -> Share:
    samples = [measured(line.get("samples", 0)) for line in lines]
    weight = [measured(line.get("weight", line.get("elements", 0))) for line in lines]
    epoch = max(int(measured(line.get("epoch", 0))) for line in lines)
    mean = float(np.mean(samples)), float(np.mean(weight))
    return Share(rank, *mean, min(weight), max(weight), epoch)
