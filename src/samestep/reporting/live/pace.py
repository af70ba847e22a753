"""Where the time of a rank's last steps has gone, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any

from samestep.events import NON_TRAINING, PHASES
from samestep.reporting.record import RankLog

__all__: list[str] = []

LOOK = 20  # lines of steps that are looked back on
_LONGEST = 1e12  # seconds, or steps; more is no measurement


@dataclass(frozen=True)
class Pace:
    """The last steps of a rank.

    Attributes:
        steps: how many they are.
        seconds: of one of them, as far as it was training; 0 where nothing is known.
        spent: seconds by phase, in their order; evaluate, save and load only where the rank has just been in one.
        samples: that this rank has taken in the last of them.
    """

    steps: int = 0
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0


def pace(log: RankLog) -> Pace:
    """Returns the pace of a rank; its first step, which warms up, counts only while it is the only one."""
    lines = list(islice((line for line in reversed(log.steps[1:]) if line["steps"]), LOOK)) or log.steps[:1]
    steps = sum(line["steps"] for line in lines)
    if not 0 < steps < _LONGEST:
        return Pace()
    spent = dict.fromkeys(PHASES, 0.0)
    for line in lines:
        for name, seconds in line["spent"].items():
            if name in spent:
                spent[name] += measured(seconds)
    trained = sum(measured(line["seconds"]) for line in lines) - sum(spent[name] for name in NON_TRAINING)
    now = log.steps[-1]["spent"] if log.end is None else {}
    spent |= {name: measured(now.get(name)) for name in NON_TRAINING}
    spent = {name: seconds for name, seconds in spent.items() if seconds}
    return Pace(steps, max(0.0, trained) / steps, spent, measured(lines[0]["work"].get("samples")))


def typical(paces: Iterable[Pace]) -> float:
    """Returns the seconds of a step, the median of the ranks; 0 where nothing is known."""
    known = [each.seconds for each in paces if each.seconds]
    return median(known) if known else 0.0


def apportioned(spent: Mapping[str, float], width: int) -> dict[str, int]:
    """Returns how many of `width` cells each phase gets: largest remainders, so that all are used.

    >>> apportioned({"forward": 1.0, "backward": 2.0, "wait": 0.01}, 10)
    {'forward': 3, 'backward': 7}
    """
    total = sum(spent.values())
    if total <= 0 or width <= 0:
        return {}
    exact = {name: width * seconds / total for name, seconds in spent.items()}
    cells = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: cells[name] - exact[name])
    for name in by_remainder[: width - sum(cells.values())]:
        cells[name] += 1
    return {name: count for name, count in cells.items() if count}


def measured(value: Any) -> float:
    """Returns a number that one can count with; 0 for what is none.

    >>> measured(1.5), measured(None), measured(float("nan")), measured(10**400)
    (1.5, 0.0, 0.0, 1000000000000.0)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(min(value, _LONGEST)) if is_number and value > 0 else 0.0
