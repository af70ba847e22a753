"""Metrics as a script prints them: the ranks' beside those of the script alone, with the same weights.

    rank 0   epoch 2: train loss 0.4127, test accuracy 0.913          0.913 is compared, as a number behind the name of
    alone    epoch 2: train loss 0.4098, test accuracy 0.914          a metric; training losses of a rank may differ

A line speaks for itself only where all such numbers in it differ: one that agrees is the evaluation's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank

__all__: list[str] = []

_NAMES = (
    "accuracy|acc@\\d|acc|top-?1|top-?5|f1|auc|auroc|precision|recall|error|wer|bleu|iou|dice|perplexity|ppl|score|mae|rmse|mse"
    "|r2|(?:val|valid|validation|test|eval|evaluation)[ _]?loss"
)
_METRIC = re.compile(rf"(?<![a-z])({_NAMES})(?![a-z])[^0-9+-]{{0,24}}([-+]?\d*\.\d+(?:e[-+]?\d+)?)", re.IGNORECASE)
_AVERAGE = re.compile(r"\s*\(\s*([-+]?\d*\.\d+(?:e[-+]?\d+)?)\s*\)", re.IGNORECASE)
_OF_TRAINING = re.compile(r"train\w*[ _]*$", re.IGNORECASE)
_DIGITS = 3  # of a number, or it agrees by chance


@dataclass(frozen=True)
class Difference:
    """A metric that the ranks print otherwise than one process."""

    name: str
    mine: str
    theirs: str
    where: str


@dataclass(frozen=True)
class Alike:
    """What the comparison has come to: whether any metric agrees, and the first of a line in which none does."""

    alike: bool
    different: Difference | None


def metrics_alike(ranks: Rank, alone: Rank) -> Alike:
    """Compares what rank 0 has printed in its evaluations with what the script alone has."""
    alike, different = False, None
    for here, there in _pairs(ranks, alone):
        equal = [mine == theirs for (_, mine), (_, theirs) in zip(metrics(here), metrics(there), strict=False)]
        if any(equal):
            alike = True
        elif equal and different is None and (found := next(_apart(here, there), None)):
            different = found
    return Alike(alike, different)


def _pairs(ranks: Rank, alone: Rank) -> Iterator[tuple[Event, Event]]:
    """The lines of each phase from one place in the script, one by one."""
    told: dict[tuple[int, str], list[Event]] = {}
    for event in alone.of("printed"):
        told.setdefault((event["phase"], event["where"]), []).append(event)
    for event in ranks.of("printed"):
        if mine := told.get((event["phase"], event["where"])):
            yield event, mine.pop(0)


def metrics(line: Event) -> list[tuple[str, str]]:
    """Returns name and number of the metrics in a line."""
    found = [
        match for match in _METRIC.finditer(line["text"]) if not _OF_TRAINING.search(line["text"][: match.start()])
    ]
    told = [(match[1], _number_of(match, line["text"])) for match in found]
    return [(name, number) for name, number in told if len(number.lstrip("+-0.").replace(".", "")) >= _DIGITS - 1]


def _number_of(match: re.Match[str], text: str) -> str:
    """The number behind a name; of "Acc@1 100.00 ( 66.67)", as the ImageNet example prints it, that of all batches."""
    average = _AVERAGE.match(text, match.end())
    return average[1] if average is not None else match[2]


def _apart(here: Event, there: Event) -> Iterator[Difference]:
    for (name, mine), (_, theirs) in zip(metrics(here), metrics(there), strict=False):
        digits, _, power = mine.lower().partition("e")
        last = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))  # of the digits that were printed
        if abs(float(mine) - float(theirs)) > 2 * last + 1e-4 * abs(float(theirs)):
            yield Difference(name, mine, theirs, here["where"])
