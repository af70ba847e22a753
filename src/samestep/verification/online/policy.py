"""The rules of --check: verify's rules, on the last events of two ranks that differ. No torch here.

A finding must be certain, for a real training is disturbed by it. Of each kind the first is reported, since what
differs later only follows from it. When states that differ are reported: :class:`ReplicaState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from samestep.verification.findings import Finding
from samestep.verification.judging import causes, communication, control, states
from samestep.verification.judging.record import Rank, Record
from samestep.verification.online.exchange import FinalSummary, StepSummary, SummaryDetail
from samestep.verification.online.samples import SampleCoverage

LOCAL_STEPS = 1024  # within which ranks that step by themselves have averaged their parameters
_OTHERS = 2  # steps of another optimizer that ranks may not be apart: one may be on its way

Details = Callable[[int], SummaryDetail | None]  # of a rank's summary; None where it is gone
Differ = Callable[[StepSummary, StepSummary], bool]
Rule = Callable[[Record, StepSummary, StepSummary], Iterator[Finding]]


class OnlineRules:
    """Compares what `size` ranks report; every kind of finding is returned once."""

    def __init__(self, size: int) -> None:
        self._coverage = SampleCoverage(size)
        self._found: set[str] = set()
        self._states: dict[int, ReplicaState] = {}

    def step(self, summaries: Sequence[StepSummary], details: Details) -> list[Finding]:
        """Returns what is new in the ranks' summaries of one step of one optimizer, in rank order."""
        if len({len(one.steps) for one in summaries}) > 1 or len({one.names for one in summaries}) > 1:
            return []  # not one optimizer: some ranks have more of them, or parts of a pipeline
        found = [one for differ, rule in _RULES for one in _compared(summaries, details, differ, rule)]
        if not found and not self._found & {"learning-rate-differs", "steps-differ", "parameter-order-differs"}:
            replicas = self._states.setdefault(summaries[0].optimizer, ReplicaState())
            found += replicas.step(summaries, details)
        if _is_one_training(summaries) and (repeated := self._coverage.add([one.passes for one in summaries])):
            found.append(repeated)
        return self._new(found)

    def final(self, ends: Sequence[FinalSummary]) -> list[Finding]:
        """Returns what the ranks' ends tell, in rank order, and what has lasted until then."""
        if not all(one.well for one in ends):
            return []
        found = list(_counts(ends))
        for number, replicas in self._states.items():
            found += replicas.final([one.spots.get(str(number), "") for one in ends])
        return self._new(found)

    def _new(self, found: Sequence[Finding]) -> list[Finding]:
        new = []
        for finding in found:
            if finding.code not in self._found:
                self._found.add(finding.code)
                new.append(finding)
        return new


def _is_one_training(summaries: Sequence[StepSummary]) -> bool:
    """Whether each rank trains one model on data of its own: by a wrapper, or gradients averaged by hand."""
    by_hand = len({one.gradients for one in summaries}) == 1 and bool(summaries[0].gradients)
    return all(one.is_data_parallel for one in summaries) or by_hand


def _compared(summaries: Sequence[StepSummary], details: Details, differ: Differ, rule: Rule) -> Iterator[Finding]:
    """Yields what a rule finds in the last events of rank 0 and of the first rank that differs from it."""
    first = summaries[0]
    rank = next((rank for rank, one in enumerate(summaries) if differ(first, one)), None)
    if rank is not None and (pair := _pair(details, 0, rank)) is not None:
        yield from rule(pair, first, summaries[rank])


def _pair(details: Details, *ranks: int) -> Record | None:
    """The last events of two ranks, as verify's rules read them; None where one is gone."""
    reported = [(rank, one) for rank in ranks if (one := details(rank)) is not None]
    return Record(Path(), [Rank(rank, one.events) for rank, one in reported]) if len(reported) == len(ranks) else None


def _rates(pair: Record, _: StepSummary, __: StepSummary) -> Iterator[Finding]:
    yield causes.rates(pair, 0, 1)


def _scalers(pair: Record, _: StepSummary, __: StepSummary) -> Iterator[Finding]:
    yield from control.scalers(_common(pair, "scaler"))


def _schedules(pair: Record, first: StepSummary, other: StepSummary) -> Iterator[Finding]:
    rank = pair.ranks[1].number
    mine, theirs = (_count(one, "scheduler") for one in (first, other))
    yield Finding(
        code="steps-differ",
        rank=rank,
        step=first.step,
        where=next((event["where"] for one in pair.ranks[::-1] for event in one.of("scheduler")[-1:]), None),
        cause=f"before step {first.step} rank {rank} has stepped its schedule {theirs} times, rank 0 {mine}",
        fix="step the schedule on every rank",
    )


def _steps(pair: Record, first: StepSummary, other: StepSummary) -> Iterator[Finding]:
    """Whether the other optimizers are as far."""
    for number, (mine, theirs) in enumerate(zip(first.steps, other.steps, strict=True)):
        if _are_out_of_step(mine, theirs):
            where, what = pair.ranks[1].steps[0]["where"], f"steps of optimizer {number}"
            found = control.unequal_steps(pair.ranks[1].number, (theirs, mine), where, what)
            at = f"though both are at step {first.step} of optimizer {first.optimizer}"
            yield replace(found, step=other.step, cause=f"{found.cause}, {at}")
            return


def _calls(pair: Record, first: StepSummary, other: StepSummary) -> Iterator[Finding]:
    common, rank = _common(pair, "collective"), pair.ranks[1].number
    if found := communication.first_difference(*common.ranks):
        yield found
        return
    mine, theirs = (_count(one, "collective") for one in (first, other))
    if mine != theirs:  # else they differ in what is not kept any more; of what was kept, an earlier summary has told
        last = common.ranks[1].events[-1:]
        yield Finding(
            code="collective-order",
            rank=rank,
            step=first.step,
            where=last[0]["where"] if last else None,
            cause=f"before step {first.step} rank {rank} has called {theirs} collectives, rank 0 {mine}",
            fix="let every rank come by every collective",
        )


def _orders(pair: Record, _: StepSummary, __: StepSummary) -> Iterator[Finding]:
    names = [sorted(name for event in one.of("wrap") for name in event["names"]) for one in pair.ranks]
    if names[0] == names[1]:  # else the ranks have different models
        yield from states.orders(pair)


def _stream(kind: str) -> Differ:
    return lambda first, other: first.streams.get(kind) != other.streams.get(kind)


_RULES: tuple[tuple[Differ, Rule], ...] = (
    (lambda first, other: first.rates != other.rates, _rates),
    (_stream("scaler"), _scalers),
    (_stream("scheduler"), _schedules),
    (lambda first, other: any(_are_out_of_step(*one) for one in zip(first.steps, other.steps, strict=True)), _steps),
    (_stream("collective"), _calls),
    (_stream("wrap"), _orders),
)


def _are_out_of_step(mine: int, theirs: int) -> bool:
    return abs(theirs - mine) >= _OTHERS


def _count(summary: StepSummary, kind: str) -> int:
    return (summary.streams.get(kind) or [0])[0]


def _common(pair: Record, kind: str) -> Record:
    """Of the numbered events of a kind, those that both ranks still have."""
    events = [[event for event in one.of(kind) if event.get("group", "world") == "world"] for one in pair.ranks]
    begin = max((theirs[0]["index"] for theirs in events if theirs), default=0)
    kept = [[event for event in theirs if event["index"] >= begin] for theirs in events]
    return Record(Path(), [Rank(one.number, events) for one, events in zip(pair.ranks, kept, strict=True)])


class ReplicaState:
    """The parameters and gradients of one optimizer, summary by summary.

    Parameters that differ while their gradients agree are reported at once. Gradients that differ are reported where
    the last forward went through DistributedDataParallel. Elsewhere it may be local SGD, which averages later: they are
    reported after LOCAL_STEPS steps or at the end, unless the ranks agreed again before any step in between. Ranks that
    differ from the beginning are parts of a pipeline, experts, or models of their own: they are never reported.
    """

    def __init__(self) -> None:
        self._agreed: set[str] = set()  # tensors that have been equal on all ranks
        self._pending: Finding | None = None  # gradients that differ, which may be intended
        self._since = 0
        self._is_over = False

    def step(self, summaries: Sequence[StepSummary], details: Details) -> Iterator[Finding]:
        """Yields what the states of one step tell."""
        if self._is_over or any(one.is_not_comparable for one in summaries):
            return
        columns = zip(*(one.spots for one in summaries), strict=False)
        if self._pending is not None and any(column[0] and len(set(column)) == 1 for column in columns):
            self._recovered()
        ranks = next(_differing(summaries), None)
        if ranks is None:
            # which tensors agree is asked for once, or where a large model is looked at in turns
            own = details(0)
            self._agreed |= set() if own is None else set(own.parameters)
            self._recovered()
            return
        first, other, pair = details(ranks[0]), details(ranks[1]), _pair(details, *ranks)
        if first is not None and other is not None and pair is not None:
            yield from self._compare(summaries[ranks[1]], pair, first, other)

    def _compare(
        self, summary: StepSummary, pair: Record, first: SummaryDetail, other: SummaryDetail
    ) -> Iterator[Finding]:
        values = [name for name, value in other.parameters.items() if first.parameters.get(name, value) != value]
        torn = [name for name, value in other.gradients.items() if first.gradients.get(name, value) != value]
        self._agreed |= set(other.parameters) - set(values)
        if not values and summary.step > self._since:
            self._recovered()
        stepped = [name for name in values if other.gradients.get(name) is not None]
        if stepped and not set(stepped) & set(torn):
            self._is_over = True
            yield _diverged(summary, pair, values) if set(values) & self._agreed else _initial(summary, pair, values)
        elif (agreed := [name for name in torn if name in self._agreed]) and (self._pending is None or values):
            if self._pending is None:
                if not summary.is_wrapped and len(agreed) == len(other.gradients):
                    return  # nothing says that they are meant to be together
                self._since = summary.step
                step = {**pair.ranks[0].steps[0], "gradients": first.gradients}
                self._pending = causes.unequal_gradients(pair.ranks[0], pair.ranks[1].number, step, agreed)
            is_long = summary.is_synchronised or summary.step - self._since >= LOCAL_STEPS
            if set(agreed) & set(values) and is_long:
                self._is_over = True
                yield self._pending

    def _recovered(self) -> None:
        """Equal again: local steps, whose parameters are averaged."""
        self._is_over |= self._pending is not None

    def final(self, spots: Sequence[str]) -> Iterator[Finding]:
        """Yields what has lasted until the end."""
        if self._pending is not None and not self._is_over and "" not in spots and len(set(spots)) > 1:
            yield self._pending


def _differing(summaries: Sequence[StepSummary]) -> Iterator[tuple[int, int]]:
    """Two ranks that hold the same parts, with other values."""
    first: dict[str, int] = {}
    for rank, one in enumerate(summaries):
        known = first.setdefault(one.layout, rank)
        if (one.parameters, one.gradients) != (summaries[known].parameters, summaries[known].gradients):
            yield known, rank


def _initial(summary: StepSummary, pair: Record, names: list[str]) -> Finding:
    when = f"before step {summary.step}, and before every one that was seen,"
    found = states.unequal_start(pair, 1, names, "before the first step" if summary.step == 0 else when)
    return replace(found, step=summary.step, cause=f"{found.cause}, and their gradients are equal")


def _diverged(summary: StepSummary, pair: Record, names: list[str]) -> Finding:
    first, other = pair.ranks
    when, why = f"before step {summary.step}", "they have been equal, and gradients and learning rates still are"
    return causes.diverged(first.number, other.number, summary.step, names, when, why, other.steps[0]["where"])


def _counts(ends: Sequence[FinalSummary]) -> Iterator[Finding]:
    for number, counts in enumerate(zip(*(one.steps for one in ends), strict=False)):
        rank = next((i for i, count in enumerate(counts) if count != counts[0]), None)
        if rank is not None:
            what = f"steps of optimizer {number}"
            yield control.unequal_steps(rank, (counts[rank], counts[0]), ends[rank].where, what)
            return
