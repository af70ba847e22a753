"""Metrics as a script prints them: the ranks' beside those of the script alone, with the same weights.

    rank 0   epoch 2: train loss 0.4127, test accuracy 0.913          0.913 is compared, as a number behind the name of
    alone    epoch 2: train loss 0.4098, test accuracy 0.914          a metric; training losses of a rank may differ

A line speaks for itself only where all such numbers in it differ: one that agrees is the evaluation's. What each rank
prints of its own part is no metric of the whole, if it says so, or if there is one of the whole too.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.verification.journal import Event
from samestep.verification.judging.outcomes import Place

__all__: list[str] = []

_NAMES = (
    "accuracy|acc@\\d|acc|top-?1|top-?5|f1|auc|auroc|precision|recall|error|wer|bleu|iou|dice|perplexity|ppl|score|mae|rmse|mse"
    "|r2|nll|elbo|ndcg|map|hits?(?:[ _]?rate)?|r@\\d+|bpc|bpb|bits"
    "|(?:val|valid|validation|test|eval|evaluation)(?:[ _]?loss)?"
)
_BETWEEN = r"(?:(?!time|took|sec|lr|step|epoch|speed)[^0-9+-]){0,24}"
_NUMBER = r"([-+]?\d*\.\d+(?:e[-+]?\d+)?)(?!\s*(?:s|ms|sec|seconds)\b)"
_METRIC = re.compile(rf"(?<![a-z])({_NAMES})(?![a-z])(?:@\d+)?{_BETWEEN}{_NUMBER}", re.IGNORECASE)
_ANY = re.compile(rf"(?<!lr)(?<!rate)[ =:]+{_NUMBER}", re.IGNORECASE)
_AVERAGE = re.compile(r"\s*\(\s*([-+]?\d*\.\d+(?:e[-+]?\d+)?)\s*\)", re.IGNORECASE)
_OF_TRAINING = re.compile(r"train\w*[ _]*$", re.IGNORECASE)
_ABOUT_TRAINING = re.compile(r"loss|train|\blr\b|rate|time|sec|step|speed|norm|grad|/s\b", re.IGNORECASE)
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
    """What the comparison has come to.

    Attributes:
        alike: whether any metric agrees.
        whole: whether all do that were compared.
        different: the first of a line in which none does.
        local: where each rank prints numbers of its part, and says so or prints others of the whole too.
        unsure: lines that differ, and that may: by random numbers, or by what a batch is made of.
        unnamed: whether a line agrees in all its numbers, none of which has a known name.
        unknown: where the first line is that does not, and that is not about the training.
    """

    alike: bool = False
    whole: bool = False
    different: Difference | None = None
    local: str | None = None
    unsure: int = 0
    unnamed: bool = False
    unknown: str | None = None


def metrics_alike(
    ranks: Sequence[Mapping[Place, Event]],
    alone: Mapping[Place, Event],
    may_differ: Container[str] = (),
    *,
    known: bool = False,
) -> Alike:
    """Compares what the ranks have printed at the ends of evaluations with what the script alone has.

    Args:
        ranks: the lines of each rank, by place.
        alone: those of the script alone.
        may_differ: phases in which a difference is none of the evaluation's.
        known: whether something else tells what the evaluations of all ranks together come to.
    """
    reported = {place: event for lines in reversed(ranks) for place, event in lines.items()}  # by the first rank
    local = {place[1:3]: place for place in reported if _is_local(place, ranks)}
    whole = {place: event for place, event in reported.items() if place[1:3] not in local}
    found = _compared(whole, alone, may_differ)
    if not (known or found.alike or found.different):  # what a rank prints of its part, it takes for the whole
        local = {line: place for line, place in local.items() if _names_rank(place, ranks)}
        whole = {place: event for place, event in reported.items() if place[1:3] not in local}
        found = _compared(whole, alone, may_differ)
    return replace(found, local=next((line[0] for line in local), None))


def _compared(lines: Mapping[Place, Event], alone: Mapping[Place, Event], may_differ: Container[str]) -> Alike:
    alike, whole, different, unsure, unnamed, unknown = False, True, None, 0, False, None
    for place, here in lines.items():
        there = alone.get(place)
        pairs = list(zip(metrics(here), metrics(there), strict=False)) if there is not None else []
        if there is None or not pairs:
            same = _have_same_numbers(here, there) if there is not None else None
            unnamed, unknown = unnamed or same is True, unknown or (here["where"] if same is False else None)
            continue
        apart = list(_apart(here, there))
        if len(apart) == len(pairs) and (here["drew"] != there["drew"] or place[0] in may_differ):
            unsure += 1
            continue
        alike = alike or any(mine == theirs for (_, mine), (_, theirs) in pairs)
        whole = whole and not apart
        if len(apart) == len(pairs) and different is None:
            different = apart[0]
    return Alike(alike, whole and alike, different, unsure=unsure, unnamed=unnamed, unknown=unknown)


def _have_same_numbers(here: Event, there: Event) -> bool | None:
    """Whether all numbers of a line agree, which are called by names of the script's own: "area 0.9912".

    None where there are none, or a line that differs may be about the training.
    """
    told = [[number for number in _ANY.findall(line["text"]) if _is_precise(number)] for line in (here, there)]
    if told[0] and told[0] == told[1]:
        return True
    return None if not (told[0] and told[1]) or _ABOUT_TRAINING.search(here["text"]) else False


def numbers_of(line: Event) -> list[float]:
    """Returns all numbers of a line that may be metrics."""
    return [float(number) for number in [*(one for _, one in metrics(line)), *_ANY.findall(line["text"])]]


def _is_precise(number: str) -> bool:
    return len(number.lstrip("+-0.").replace(".", "")) >= _DIGITS


def _is_local(place: Place, ranks: Sequence[Mapping[Place, Event]]) -> bool:
    told = [[number for _, number in metrics(lines[place])] for lines in ranks if place in lines]
    return any(numbers != told[0] for numbers in told)


def _names_rank(place: Place, ranks: Sequence[Mapping[Place, Event]]) -> bool:
    """Whether each rank prints its number in a line."""
    told = [
        [number == str(rank) for number in re.findall(r"\d+", lines[place]["text"])]
        for rank, lines in enumerate(ranks)
        if place in lines
    ]
    return any(all(numbers) for numbers in zip(*told, strict=False))


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
