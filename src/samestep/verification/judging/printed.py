"""Compares the metrics that a script prints on the ranks with those of the script alone, with the same weights.

    rank 0   epoch 2: train loss 0.4127, test accuracy 0.913          0.913 is compared, as a number behind the name of
    alone    epoch 2: train loss 0.4098, test accuracy 0.914          a metric; training losses of a rank may differ

What each rank prints of its own part is no metric of the whole, if it says so, or if there is one of the whole too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.verification.journal import Event
from samestep.verification.judging.evaluation_outcomes import Place

_NAMES = (
    "accuracy|acc@\\d|acc|top-?1|top-?5|f1|auc|auroc|precision|recall|error|wer|bleu|iou|dice|perplexity|ppl|score|mae|rmse|mse"
    "|r2|nll|elbo|ndcg|map|hits?(?:[ _]?rate)?|r@\\d+|bpc|bpb|bits"
    "|metric|(?:val|valid|validation|dev|test|eval|evaluation)(?:[ _]?loss)?"
)
_BETWEEN = r"(?:(?!time|took|sec|lr|step|epoch|speed)[^0-9+-]){0,24}"
_NUMBER = r"([-+]?\d*\.\d+(?:e[-+]?\d+)?)(?!\s*(?:s|ms|sec|seconds)\b)"
_METRIC = re.compile(rf"(?<![a-z])({_NAMES})(?![a-z])(?:@\d+)?{_BETWEEN}{_NUMBER}", re.IGNORECASE)
_ANY = re.compile(rf"(?<!lr)(?<!rate)[ =:]+{_NUMBER}", re.IGNORECASE)
_AVERAGE = re.compile(r"\s*\(\s*([-+]?\d*\.\d+(?:e[-+]?\d+)?)\s*\)", re.IGNORECASE)
_FURTHER = re.compile(rf"(?:\s*,\s*|\s+){_NUMBER}", re.IGNORECASE)
_BESIDE = re.compile(rf"\s*(?:[/|]|-+>|→|\bvs\b\.?)\s*{_NUMBER}", re.IGNORECASE)
_SIDES = re.compile(r"(train)\w*\s*(?:[/|]|-+>|→|\bvs\b\.?)\s*(?:val|dev|test|eval)", re.IGNORECASE)
_SECTION = re.compile(
    r"(?<![a-z])(?:(train)\w*|(?:val|valid|validation|dev|test|eval|evaluation)(?![a-z]))", re.IGNORECASE
)
_OF_TRAINING = re.compile(r"train\w*[ _]*$", re.IGNORECASE)
_ABOUT_TRAINING = re.compile(r"loss|train|\blr\b|rate|time|sec|step|speed|norm|grad|/s\b", re.IGNORECASE)
_COUNT = re.compile(r"(?<![\d.])\d+(?!\.?\d)")
_DIGITS = 3  # of a number, or it agrees by chance
_SATURATED = {0.0, 1.0, 100.0}  # where a metric ends: both may be there, whatever the samples


@dataclass(frozen=True)
class Metric:
    """A number behind the name of a metric.

    Attributes:
        name: of the metric.
        number: as it was printed.
        is_of_evaluation: whether a word before it says so.
        start: of the name in the line; several numbers may follow one name, and one behind a slash is another's.
    """

    name: str
    number: str
    is_of_evaluation: bool
    start: int

    @property
    def is_saturated(self) -> bool:
        """Whether it is where a metric ends."""
        return float(self.number) in _SATURATED

    @property
    def last_digit(self) -> float:
        """What 1 more in the last digit that was printed is worth."""
        digits, _, power = self.number.lower().partition("e")
        return 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


@dataclass(frozen=True)
class Difference:
    """A metric that the ranks print otherwise than one process."""

    name: str
    mine: str
    theirs: str
    where: str
    is_of_evaluation: bool
    start: int


@dataclass(frozen=True)
class Alike:
    """What the comparison has come to.

    Attributes:
        alike: whether any metric agrees.
        finest: the last digit of the most precise one of these, as a share of it.
        saturated: whether any is 0, 1 or 100 on both sides.
        whole: whether all agree that were compared.
        different: the first that differs and is the evaluation's.
        local: where each rank prints numbers of its part, and says so or prints others of the whole too.
        unsure: lines that differ, and that may: by random numbers, or by what a batch is made of.
        unnamed: whether a line agrees in all its numbers, none of which has a known name.
        unknown: the first such number that does not, in a line that is not about the training; or one that each rank
            prints otherwise, while the evaluation of all is gathered.
    """

    alike: bool = False
    finest: float = math.inf
    saturated: bool = False
    whole: bool = False
    different: Difference | None = None
    local: str | None = None
    unsure: int = 0
    unnamed: bool = False
    unknown: Difference | None = None


def metrics_alike(
    ranks: Sequence[Mapping[Place, Event]],
    alone: Mapping[Place, Event],
    may_differ: Container[str] = (),
    *,
    known: bool = False,
    gathers: bool = False,
    miscounts: bool = False,
) -> Alike:
    """Compares what the ranks have printed at the ends of evaluations with what the script alone has.

    Args:
        ranks: the lines of each rank, by place.
        alone: those of the script alone.
        may_differ: phases in which a difference is none of the evaluation's.
        known: whether something else tells what the evaluations of all ranks together come to.
        gathers: whether rows of all ranks are gathered: then what each rank prints may be of its part alone.
        miscounts: whether the ranks together evaluate samples twice, or never. Then any number that differs is theirs.
    """
    reported = {place: event for lines in reversed(ranks) for place, event in lines.items()}  # by the first rank
    local = {place[1:3]: place for place in reported if _is_local(place, ranks)}
    whole = {place: event for place, event in reported.items() if place[1:3] not in local}
    found = _compared(whole, alone, may_differ, miscounts=miscounts)
    if not (known or found.alike or found.different):  # what a rank prints of its part, it takes for the whole
        local = {line: place for line, place in local.items() if _names_rank(place, ranks)}
        whole = {place: event for place, event in reported.items() if place[1:3] not in local}
        found = _compared(whole, alone, may_differ, miscounts=miscounts)
        if gathers and found.different and not miscounts:
            found = replace(found, different=None, unknown=replace(found.different, is_of_evaluation=False))
    return replace(found, local=next((line[0] for line in local), None))


def _compared(
    lines: Mapping[Place, Event], alone: Mapping[Place, Event], may_differ: Container[str], *, miscounts: bool
) -> Alike:
    finest, saturated, whole, different, unsure, unnamed, unknown = math.inf, False, True, None, 0, False, None
    tells = any(_tells(here, alone.get(place)) for place, here in lines.items())
    for place, here in lines.items():
        there = alone.get(place)
        pairs = list(zip(metrics(here), metrics(there), strict=False)) if there is not None else []
        if there is None or not pairs:
            same = _have_same_numbers(here, there) if there is not None else None
            unnamed = unnamed or same is True
            if there is not None and same is False:
                unknown = unknown or _unnamed_difference(here, there)
            continue
        apart = list(_apart(pairs, here["where"]))
        equal = [one for one, other in pairs if one.number == other.number]
        agreeing = [one for one in equal if not one.is_saturated]
        # of numbers of one metric, some of which agree; at its end an evaluation's agrees, too
        lists = {one.start for one in equal if one.is_of_evaluation or not one.is_saturated}
        is_known = bool(lists) or (tells and not any(one.is_of_evaluation for one, _ in pairs))
        its_own = [one for one in apart if miscounts or not is_known or one.is_of_evaluation or one.start in lists]
        if its_own and (here["drew"] != there["drew"] or place[0] in may_differ):
            unsure += 1
            continue
        finest = min([finest, *(one.last_digit / abs(float(one.number)) for one in agreeing)])
        saturated = saturated or any(one.number == other.number and one.is_saturated for one, other in pairs)
        whole = whole and not apart
        different = different or next(iter(its_own), None)
    alike = finest < math.inf
    return Alike(
        alike,
        finest,
        saturated,
        whole and (alike or saturated),
        different,
        unsure=unsure,
        unnamed=unnamed,
        unknown=unknown,
    )


def _tells(here: Event, there: Event | None) -> bool:
    """Whether a line says that a number is of the evaluation, and it is one process's: others may be the training's."""
    pairs = () if there is None else zip(metrics(here), metrics(there), strict=False)
    return any(one.is_of_evaluation and one.number == other.number and not one.is_saturated for one, other in pairs)


def _have_same_numbers(here: Event, there: Event) -> bool | None:
    """Whether all numbers of a line agree, which are called by names of the script's own: "area 0.9912".

    None where there are none, or a line that differs may be about the training of a rank: but if its numbers of the
    training agree, "loss 0.4127 area 0.9912", they are of all ranks.
    """
    (mine, training), (theirs, other) = (_by_label(line["text"]) for line in (here, there))
    if training + mine and (training, mine) == (other, theirs):
        return True
    is_of_all = training == other and bool(training)
    return False if mine and theirs and (is_of_all or not _ABOUT_TRAINING.search(here["text"])) else None


def _by_label(text: str) -> tuple[list[str], list[str]]:
    """The numbers of a line whose words before them are not about the training, and those whose words are."""
    own: list[str] = []
    training: list[str] = []
    for label, number in _labelled(text):
        (training if _ABOUT_TRAINING.search(label) else own).append(number)
    return own, training


def _labelled(text: str) -> Iterator[tuple[str, str]]:
    """The numbers of a line, each behind the words before it."""
    label, end = "", 0
    for match in _ANY.finditer(text):
        between = text[end : match.start()]
        label, end = between if re.search("[a-z]", between, re.IGNORECASE) else label, match.end()
        if _digits(match[1]) >= _DIGITS:
            yield label, match[1]


def _unnamed_difference(here: Event, there: Event) -> Difference:
    """The first number of a line that is not one process's, with the words before it; the whole line if none is."""
    pairs = zip(_labelled(here["text"]), _labelled(there["text"]), strict=False)
    label, mine, theirs = next(
        ((label, mine, theirs) for (label, mine), (_, theirs) in pairs if mine != theirs),
        ("", here["text"], there["text"]),
    )
    return Difference(label.strip(" ,;:=|-"), mine, theirs, here["where"], is_of_evaluation=True, start=0)


def numbers_of(line: Event) -> list[float]:
    """Returns all numbers of a line that may be metrics."""
    return [float(number) for number in [*(one.number for one in metrics(line)), *_ANY.findall(line["text"])]]


def _digits(number: str) -> int:
    return len(number.lstrip("+-0.").replace(".", ""))


def _is_local(place: Place, ranks: Sequence[Mapping[Place, Event]]) -> bool:
    metrics_of = [[one.number for one in metrics(lines[place])] for lines in ranks if place in lines]
    return any(numbers != metrics_of[0] for numbers in metrics_of)


def _names_rank(place: Place, ranks: Sequence[Mapping[Place, Event]]) -> bool:
    """Whether each rank prints its number in a line, counted from 0 or from 1."""
    counts = [
        [int(number) - rank for number in _COUNT.findall(lines[place]["text"])]
        for rank, lines in enumerate(ranks)
        if place in lines
    ]
    return any(set(offsets) in ({0}, {1}) for offsets in zip(*counts, strict=False))


def metrics(line: Event) -> list[Metric]:
    """Returns the metrics in a line, but for those of the training."""
    text, found = line["text"], []
    sections = [(match.start(), match[1] is None) for match in _SECTION.finditer(text)]
    for match in _METRIC.finditer(text):
        behind = [is_evaluation for start, is_evaluation in sections if match.end(1) < start < match.start(2)]
        of = behind[:1] or [is_evaluation for start, is_evaluation in sections if start <= match.start()]
        is_last = behind[:1] == [False] or of[-1:] == [False]
        is_of_training = is_last or bool(_OF_TRAINING.search(text[: match.start()]))
        numbers = [] if is_of_training else [(match.start(), _number_of(match, text)), *_further(match, text)]
        if len({start for start, _ in numbers}) > 1 and _SIDES.search(text[: match.start(2)]):
            numbers = numbers[1:]  # the first is the training's
        found += [
            Metric(match[1], number, is_of_evaluation=of[-1:] == [True], start=start)
            for start, number in numbers
            if _digits(number) >= _DIGITS - 1
        ]
    return found


def _further(match: re.Match[str], text: str) -> Iterator[tuple[int, str]]:
    """The numbers that follow that of a metric, each with where its list starts.

    With spaces or commas in between there is one for each part: they are of one list. Behind a slash, an arrow or the
    like is the same metric of something else: "acc 0.5312/0.6094" is that of the training, and of the validation.
    """
    start = match.start()
    while following := _FURTHER.match(text, match.end()) or _BESIDE.match(text, match.end()):
        start = start if following.re is _FURTHER else following.start(1)
        yield start, following[1]
        match = following


def _number_of(match: re.Match[str], text: str) -> str:
    """The number behind a name; of "Acc@1 100.00 ( 66.67)", as the ImageNet example prints it, that of all batches."""
    average = _AVERAGE.match(text, match.end())
    return average[1] if average is not None else match[2]


def _apart(pairs: Sequence[tuple[Metric, Metric]], where: str) -> Iterator[Difference]:
    for one, other in pairs:
        mine, theirs = float(one.number), float(other.number)
        if abs(mine - theirs) > 2 * one.last_digit + 1e-4 * abs(theirs):
            yield Difference(one.name, one.number, other.number, where, one.is_of_evaluation, one.start)
