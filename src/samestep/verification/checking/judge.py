"""What follows from the letters of all ranks. No torch here: letters in, findings out.

A finding must be certain, for a real training is disturbed by it; so what may be meant is not told, or only once it
has lasted:

    parameters differ, their gradients agree     the ranks step together and are not together: told at once
    gradients differ, parameters did not         told where the last forward went through DistributedDataParallel; else
      before, and do afterwards                  it may be local SGD, which averages later: told after 1024 steps or at
                                                 the end, unless the ranks agreed again before any step in between
    both differ from the beginning               parts of a pipeline, experts, one model for each rank: never told

What differs later only follows from what differed first, so of each kind the first is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from samestep.verification.checking.letters import Detail, Farewell, Letter
from samestep.verification.checking.seen import Seen
from samestep.verification.findings import Finding
from samestep.verification.judging import communication
from samestep.verification.judging.record import Rank
from samestep.verification.judging.words import listed, numbers

__all__: list[str] = []

PATIENCE = 1024  # steps within which local ones have been averaged
_APART = 2  # steps of another optimizer: one less may be on its way

Details = Callable[[int], Detail | None]


class Judge:
    """Compares what `size` ranks tell of themselves; every kind of finding is returned once."""

    def __init__(self, size: int) -> None:
        self._seen = Seen(size)
        self._found: set[str] = set()
        self._states: dict[int, _States] = {}

    def letters(self, letters: Sequence[Letter], details: Details) -> list[Finding]:
        """Returns what is new in the ranks' letters of one step, in rank order.

        Args:
            letters: of one optimizer and step.
            details: returns what stands behind a rank's letter, None where it is gone.
        """
        if len({len(letter.steps) for letter in letters}) > 1 or len({letter.names for letter in letters}) > 1:
            return []  # not one optimizer: some ranks have more of them, or parts of a pipeline
        found = [*_rates(letters), *_scalers(letters), *_schedules(letters), *_steps(letters)]
        found += [*_calls(letters, details), *_orders(letters, details)]
        if not found and not self._found & {"learning-rate-differs", "steps-differ", "parameter-order-differs"}:
            states = self._states.setdefault(letters[0].optimizer, _States())
            found += states.judge(letters, details)
        if _is_dealt(letters) and (repeated := self._seen.add([letter.passes for letter in letters])):
            found.append(repeated)
        return self._new(found)

    def farewells(self, farewells: Sequence[Farewell]) -> list[Finding]:
        """Returns what the ranks' ends tell, in rank order, and what has lasted until then."""
        if not all(farewell.well for farewell in farewells):
            return []
        found = list(_counts(farewells))
        for number, states in self._states.items():
            found += states.last([farewell.probes.get(str(number), "") for farewell in farewells])
        return self._new(found)

    def _new(self, found: Sequence[Finding]) -> list[Finding]:
        new = []
        for finding in found:
            if finding.code not in self._found:
                self._found.add(finding.code)
                new.append(finding)
        return new


def _is_dealt(letters: Sequence[Letter]) -> bool:
    """Whether the ranks are one training, each on data of its own: by a wrapper, or gradients averaged by hand."""
    by_hand = len({letter.gradients for letter in letters}) == 1 and bool(letters[0].gradients)
    return all(letter.is_dealt for letter in letters) or by_hand


def _other(letters: Sequence[Letter], what: Callable[[Letter], object]) -> int | None:
    """The first rank that tells something else than rank 0."""
    first = what(letters[0])
    return next((rank for rank, letter in enumerate(letters) if what(letter) != first), None)


def _rates(letters: Sequence[Letter]) -> Iterator[Finding]:
    rank = _other(letters, lambda letter: letter.rates)
    if rank is None:
        return
    first, other = letters[0], letters[rank]
    yield Finding(
        code="learning-rate-differs",
        property="control",
        rank=rank,
        step=other.step,
        factor=other.rates[0] / first.rates[0] if first.rates and other.rates and first.rates[0] else None,
        where=other.scheduled or other.made,
        cause=f"at step {other.step} rank {rank} steps with the rate {numbers(other.rates)}, rank 0 with "
        f"{numbers(first.rates)}",
        fix="let every rank compute the rate from values that all ranks share: reduce the metric that a schedule sees",
    )


def _scalers(letters: Sequence[Letter]) -> Iterator[Finding]:
    rank = _other(letters, lambda letter: letter.scaler)
    if rank is None or not letters[0].scaler or not letters[rank].scaler:
        return
    told = [
        f"has skipped {int(letters[i].scaler[1])} steps and has the scale {letters[i].scaler[2]:g}" for i in (rank, 0)
    ]
    yield Finding(
        code="steps-differ",
        property="control",
        rank=rank,
        step=letters[rank].step,
        where=letters[rank].scaled,
        cause=f"before step {letters[rank].step} the scaler of rank {rank} {told[0]}, that of rank 0 {told[1]}",
        fix="reduce the gradients before the scaler looks at them, or reduce its found_inf",
    )


def _schedules(letters: Sequence[Letter]) -> Iterator[Finding]:
    rank = _other(letters, lambda letter: letter.schedules)
    if rank is not None:
        yield Finding(
            code="steps-differ",
            property="control",
            rank=rank,
            step=letters[rank].step,
            where=letters[rank].scheduled or letters[0].scheduled,
            cause=f"before step {letters[rank].step} rank {rank} has stepped its schedule {letters[rank].schedules} "
            f"times, rank 0 {letters[0].schedules}",
            fix="step the schedule on every rank",
        )


def _steps(letters: Sequence[Letter]) -> Iterator[Finding]:
    """Whether the other optimizers are as far."""
    for number, first in enumerate(letters[0].steps):
        rank = next((i for i, letter in enumerate(letters) if abs(letter.steps[number] - first) >= _APART), None)
        if rank is not None:
            yield Finding(
                code="steps-differ",
                property="control",
                rank=rank,
                step=letters[rank].step,
                where=letters[rank].where,
                cause=f"optimizer {number} of rank {rank} has taken {letters[rank].steps[number]} steps, that of rank "
                f"0 {first}, though both are at step {letters[0].step} of optimizer {letters[0].optimizer}",
                fix="let all ranks decide together: reduce what the decision depends on",
            )
            return


def _calls(letters: Sequence[Letter], details: Details) -> Iterator[Finding]:
    rank = _other(letters, lambda letter: letter.calls)
    if rank is None:
        return
    first, other = details(0), details(rank)
    if first is not None and other is not None:
        begin = max(told.calls[0]["index"] if told.calls else 0 for told in (first, other))
        ranks = [
            Rank(i, [one for one in told.calls if one["index"] >= begin]) for i, told in ((0, first), (rank, other))
        ]
        if found := communication.first_difference(*ranks):
            yield found
            return
    counts = [letters[i].calls[0] for i in (rank, 0)]
    if counts[0] == counts[1]:
        return  # they differ in what is not kept any more; of a difference that was kept, the letter before has told
    yield Finding(
        code="collective-order",
        property="communication",
        rank=rank,
        step=letters[rank].step,
        where=other.calls[-1]["where"] if other is not None and other.calls else None,
        cause=f"before step {letters[rank].step} rank {rank} has called {counts[0]} collectives, rank 0 {counts[1]}",
        fix="let every rank come by every collective",
    )


def _orders(letters: Sequence[Letter], details: Details) -> Iterator[Finding]:
    rank = _other(letters, lambda letter: letter.order[:1])
    if rank is None or letters[rank].order[1:] != letters[0].order[1:]:
        return
    first, other = details(0), details(rank)
    names = ["", ""] if first is None or other is None else [first.names, other.names]
    at, pair = next(
        ((i, pair) for i, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]), (0, ("", ""))
    )
    yield Finding(
        code="parameter-order-differs",
        property="parameter_order",
        rank=rank,
        tensor=pair[1] or None,
        where=letters[rank].made,
        cause=f"rank {rank} registers {pair[1]} where rank 0 has {pair[0]} (parameter {at}): the ranks average, and "
        "broadcast, one tensor into another",
        fix="register parameters in one order on all ranks: iterate over a list or sorted(...), not over a set",
    )


class _States:
    """The parameters and gradients of one optimizer, letter by letter."""

    def __init__(self) -> None:
        self._agreed: set[str] = set()  # tensors that have been equal on all ranks
        self._suspicion: Finding | None = None
        self._since = 0
        self._is_over = False

    def judge(self, letters: Sequence[Letter], details: Details) -> Iterator[Finding]:
        if self._is_over or any(letter.is_foreign for letter in letters):
            return
        self._look_whether_healed([letter.probes for letter in letters])
        apart = next(_apart(letters), None)
        if apart is None:
            self._remember(details)
            return
        pair = [details(rank) for rank in apart]
        if pair[0] is None or pair[1] is None:
            return
        yield from self._judge(letters, apart, pair[0], pair[1])

    def _judge(
        self, letters: Sequence[Letter], apart: tuple[int, int], first: Detail, other: Detail
    ) -> Iterator[Finding]:
        letter = letters[apart[1]]
        bad = [name for name, value in other.parameters.items() if first.parameters.get(name, value) != value]
        torn = [name for name, value in other.gradients.items() if first.gradients.get(name, value) != value]
        self._agreed |= set(other.parameters) - set(bad)
        if not bad and letter.step > self._since:
            self._heal()
        moved = [name for name in bad if other.gradients.get(name) is not None]
        if moved and not set(moved) & set(torn):
            self._is_over = True
            yield _parted(letter, apart, bad) if set(bad) & self._agreed else _begun_apart(letter, apart, bad)
        elif set(torn) & self._agreed and (self._suspicion is None or bad):
            yield from self._suspect(
                letter, apart, [name for name in torn if name in self._agreed], bad, len(other.gradients)
            )

    def _suspect(
        self, letter: Letter, apart: tuple[int, int], torn: list[str], bad: list[str], count: int
    ) -> Iterator[Finding]:
        if self._suspicion is None:
            if not letter.is_wrapped and len(torn) == count:
                return  # nothing says that they are meant to be together
            self._suspicion, self._since = _torn(letter, apart, torn), letter.step
        if set(torn) & set(bad) and (letter.is_together or letter.step - self._since >= PATIENCE):
            self._is_over = True
            yield self._suspicion

    def _remember(self, details: Details) -> None:
        """All agree; which tensors these were is asked for once, or where a large model is looked at in turns."""
        told = details(0)
        self._agreed |= set() if told is None else set(told.parameters)
        self._heal()

    def _heal(self) -> None:
        if self._suspicion is not None:
            self._is_over = True  # local steps, whose parameters are averaged

    def _look_whether_healed(self, probes: Sequence[Sequence[str]]) -> None:
        if self._suspicion is not None and any(
            column[0] and len(set(column)) == 1 for column in zip(*probes, strict=False)
        ):
            self._heal()

    def last(self, probes: Sequence[str]) -> Iterator[Finding]:
        """Returns what has lasted until the end."""
        if self._suspicion is not None and not self._is_over and "" not in probes and len(set(probes)) > 1:
            yield self._suspicion


def _apart(letters: Sequence[Letter]) -> Iterator[tuple[int, int]]:
    """Two ranks that hold the same parts, with other values."""
    first: dict[str, int] = {}
    for rank, letter in enumerate(letters):
        known = first.setdefault(letter.layout, rank)
        if (letter.parameters, letter.gradients) != (letters[known].parameters, letters[known].gradients):
            yield known, rank


def _begun_apart(letter: Letter, apart: tuple[int, int], bad: list[str]) -> Finding:
    when = (
        "before the first step"
        if letter.step == 0
        else f"before step {letter.step}, and before every one that was seen,"
    )
    fix = "for p in model.parameters(): dist.broadcast(p.data, src=0)    # once, before the first step"
    if letter.is_wrapped:
        fix = "load or change weights before DistributedDataParallel(model), which sends rank 0's to all; not after it"
    return Finding(
        code="initial-state-differs",
        property="initial_state",
        rank=apart[1],
        step=letter.step,
        tensor=bad[0],
        where=letter.made,
        cause=f"{when} rank {apart[1]} has other values than rank {apart[0]} in {listed(bad)}, and their gradients are "
        "equal",
        fix=fix,
    )


def _parted(letter: Letter, apart: tuple[int, int], bad: list[str]) -> Finding:
    return Finding(
        code="parameters-diverged",
        property="parameters",
        rank=apart[1],
        step=letter.step,
        tensor=bad[0],
        where=letter.where,
        cause=f"before step {letter.step} rank {apart[1]} has other values than rank {apart[0]} in {listed(bad)}, "
        "which have been equal; gradients and learning rates are",
        fix="do the same to the parameters on every rank, or broadcast them from rank 0 afterwards",
    )


def _torn(letter: Letter, apart: tuple[int, int], torn: list[str]) -> Finding:
    return Finding(
        code="gradients-not-synchronised",
        property="gradients",
        rank=apart[1],
        step=letter.step,
        tensor=torn[0],
        where=letter.where,
        cause=f"at step {letter.step} rank {apart[1]} has different gradients than rank {apart[0]} in {listed(torn)}"
        ", and nothing has made the parameters equal since",
        fix="call the DistributedDataParallel model itself, the last micro-batch outside no_sync(); or average every "
        "gradient between backward() and step()",
    )


def _counts(farewells: Sequence[Farewell]) -> Iterator[Finding]:
    for number, counts in enumerate(zip(*(farewell.steps for farewell in farewells), strict=False)):
        rank = next((i for i, count in enumerate(counts) if count != counts[0]), None)
        if rank is not None:
            yield Finding(
                code="steps-differ",
                property="control",
                rank=rank,
                step=min(counts),
                where=farewells[rank].where,
                cause=f"rank {rank} took {counts[rank]} steps of optimizer {number}, rank 0 {counts[0]}",
                fix="let all ranks decide together: reduce what the decision depends on",
            )
            return
