"""Learning rates of N ranks and of one process, where a schedule moves on once for each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from journals import Event, ended, passed, record, step

from samestep.verification.findings import AGREES, DECLARED, REFUTED, Finding
from samestep.verification.judging import control, rates
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Run
from samestep.verification.judging.reference import Comparison
from samestep.verification.recording.optimizers import settings_of
from samestep.verification.report import Report
from samestep.verification.runs import Ended

MOVED: Event = {"kind": "scheduler", "where": "train.py:31"}
NOBODY = Others(lambda: Run(ENDED, record()), list)
ENDED = Ended(code=0, hung=False, failure=None, folder=Path("/nowhere"))


def alone(event: int, rate: float) -> list[Event]:
    return [{"kind": "rates", "event": event, "optimizer": 0, "rates": [rate]}, step(event, "g")]


def found(
    ranks: list[Event], single: list[Event], own: list[Event] | None = None, pace: list[Event] | None = None
) -> list[Finding]:
    """What is found; `own` is of the script alone with the lengths that its loaders have there, `pace` at its own."""
    report = Report(ranks=2, steps=3)
    others = replace(
        NOBODY,
        own_lengths=None if own is None else lambda: Run(ENDED, record(own)),
        own_pace=None if pace is None else lambda: record(pace),
    )
    Comparison(record(ranks, ranks), Run(ENDED, record(single)), others).judge(report)
    return report.findings


def moving(times: int, *rates: float) -> list[Event]:
    """The ranks, whose schedule moves on so many times at every step."""
    steps = [step(number, "g", rates=[rate]) for number, rate in enumerate(rates)]
    return [event for one in steps for event in (one, *[MOVED] * times)]


def moving_alone(*rates: float) -> list[Event]:
    return [event for number, rate in enumerate(rates) for event in (*alone(number, rate), MOVED)]


@pytest.mark.parametrize(
    ("own", "severity"),
    [
        ((0.8, 0.7, 0.6), "note"),  # as long as the batches of one process, of which each rank has a part
        ((0.8, 0.75, 0.7), "error"),  # as long as those of a rank, and over after half of the steps
        (None, "error"),
    ],
)
def test_a_schedule_that_moves_on_for_each_rank_must_be_as_long(own: tuple[float, ...] | None, severity: str) -> None:
    ranks, single = moving(2, 0.8, 0.6, 0.4), moving_alone(0.8, 0.7, 0.6)
    (finding,) = found(ranks, single, None if own is None else moving_alone(*own))
    assert (finding.code, finding.severity, finding.where) == ("learning-rate-differs", severity, "train.py:31")


@pytest.mark.parametrize(("length", "severity"), [(4, "note"), (2, "error")])
def test_such_a_schedule_counts_the_batches_of_one_rank(length: int, severity: str) -> None:
    """Where one process has as many batches as a rank, it moves on as often at a step and not more often."""
    trained = passed([0, 1], samples=8, length=2)[:3]
    ranks = [*trained, *moving(2, 0.8, 0.6, 0.4)]
    lengths: Event = {"kind": "own_length", "key": trained[0]["key"], "own": length}
    own = [lengths, *moving_alone(0.8, 0.7, 0.6)]
    assert [one.severity for one in found(ranks, moving_alone(0.8, 0.7, 0.6), own)] == [severity]


@pytest.mark.parametrize(("times", "where"), [(1, "train.py:18"), (3, "train.py:31")])
def test_a_schedule_that_moves_on_as_often_was_made_with_another_length(times: int, where: str) -> None:
    made: Event = {"kind": "schedule_made", "where": "train.py:18"}
    (finding,) = found([made, *moving(times, 0.8, 0.65, 0.4)], [made, *moving_alone(0.8, 0.7, 0.6)])
    assert (finding.code, finding.where) == ("learning-rate-differs", where)


def test_a_schedule_that_has_the_same_rates_at_the_same_steps_needs_no_explanation() -> None:
    """accelerate's examples plan `max_train_steps * num_processes`."""
    assert found(moving(2, 0.8, 0.6, 0.4), moving_alone(0.8, 0.6, 0.4)) == []


def test_a_rate_that_no_step_of_the_schedule_explains_is_an_error() -> None:
    (error,) = found(moving(2, 0.8, 0.3, 0.05), moving_alone(0.8, 0.4, 0.2), moving_alone(0.8, 0.4, 0.2))
    assert (error.severity, error.step, error.factor) == ("error", 1, 0.75)


@pytest.mark.parametrize(
    "rates",
    [
        [(0.0, 0.0), (0.4, 0.2), (0.8, 0.4), (0.41, 0.21), (0.01, 0.01)],  # from 0 to a peak, and down to a floor
        [(0.1, 0.1), (0.15, 0.1), (0.2, 0.1), (0.02, 0.01)],  # Goyal et al.: from the rate of one process
        [(0.141421, 0.1), (0.0707107, 0.05)],
    ],
)
def test_a_rate_between_that_of_one_process_and_a_scaled_one_is_a_note(rates: list[tuple[float, float]]) -> None:
    ranks = [step(number, "g", rates=[mine]) for number, (mine, _) in enumerate(rates)]
    single = [event for number, (_, theirs) in enumerate(rates) for event in alone(number, theirs)]
    assert [one.severity for one in found(ranks, single)] == ["note"]


@pytest.mark.parametrize(
    "rates",
    [
        [(0.1, 0.05), (0.2, 0.1), (0.2, 0.15), (0.2, 0.2)],  # a warm-up that is over sooner
        [(0.2, 0.2), (0.1, 0.05)],  # another floor
        [(0.2, 0.1), (0.04, 0.05)],  # scaled, and over sooner
        [(0.4, 0.1), (0.2, 0.1)],  # scaled twice
    ],
)
def test_a_schedule_of_another_pace_is_no_scaled_rate(rates: list[tuple[float, float]]) -> None:
    ranks = [step(number, "g", rates=[mine]) for number, (mine, _) in enumerate(rates)]
    single = [event for number, (_, theirs) in enumerate(rates) for event in alone(number, theirs)]
    assert "error" in [one.severity for one in found(ranks, single)]


@pytest.mark.parametrize(
    ("pace", "severity"),
    [
        ((0.1, 0.2, 0.3, 0.4, 0.3, 0.2), "note"),  # half as high as the ranks' behind as many samples
        ((0.4, 0.4, 0.8, 0.8, 0.4, 0.4), None),  # as high
        ((0.1, 0.1, 0.2, 0.2, 0.1, 0.1), "error"),  # a quarter
        ((0.1, 0.2, 0.3), "error"),  # over after as many steps as the ranks take
    ],
)
def test_a_schedule_as_long_as_the_passes_has_the_same_rates_behind_as_many_samples(
    pace: tuple[float, ...], severity: str | None
) -> None:
    ranks = [step(number, "g", rates=[rate]) for number, rate in enumerate((0.4, 0.8, 0.4))]
    single = [event for number, rate in enumerate((0.1, 0.2, 0.3)) for event in alone(number, rate)]
    own = [step(number, "g", rates=[rate]) for number, rate in enumerate(pace)]
    assert [one.severity for one in found(ranks, single, pace=own)] == ([] if severity is None else [severity])


@pytest.mark.parametrize(("is_over", "severities"), [(True, []), (False, ["error"])])
def test_a_schedule_may_count_batches_of_which_the_last_are_smaller(*, is_over: bool, severities: list[str]) -> None:
    """Two epochs of nine steps of the ranks are 33 steps of one process, not 36."""
    ranks, own = ([step(one, "g", rates=[1 - one / count]) for one in range(count)] for count in (18, 33))
    single = [event for number in range(18) for event in alone(number, 1 - number / 33)]
    end = [ended()] * is_over
    assert [one.severity for one in found([*ranks, *end], single, pace=[*own, *end])] == severities


@pytest.mark.parametrize(
    ("ranks", "severity"),
    [
        ((0.0, 0.8, 0.4), "note"),
        ((0.0, 0.8, 0.1), "error"),  # decays faster, even with the samples of the warm-up
        ((0.4, 0.8, 0.4), "error"),  # another warm-up
    ],
)
def test_a_warm_up_may_have_as_many_steps_for_ranks_as_for_one_process(ranks: tuple[float, ...], severity: str) -> None:
    pace = (0.0, 0.8, 0.64, 0.48, 0.32, 0.16)
    single = [event for number, rate in enumerate(pace[:3]) for event in alone(number, rate)]
    own = [step(number, "g", rates=[rate]) for number, rate in enumerate(pace)]
    own_steps = [step(number, "g", rates=[rate]) for number, rate in enumerate(ranks)]
    assert [one.severity for one in found(own_steps, single, pace=own)] == [severity]


def test_rates_that_a_script_sets_itself_are_compared_step_by_step() -> None:
    ranks = [step(0, "g", rates=[0.8]), step(1, "g", rates=[0.4])]
    assert found(ranks, [*alone(0, 0.8), *alone(1, 0.4)]) == []
    (error,) = found(ranks, [*alone(0, 0.8), *alone(1, 0.5)])
    assert (error.step, error.factor) == (1, 0.8)


def test_steps_that_a_scaler_leaves_out_on_one_side_only_are_not_compared() -> None:
    """One process has gradients of another size, so its scaler finds another scale, and its schedule lags behind."""
    skipped = {"kind": "scaler", "window": 1, "scale": 65536.0, "skipped": True, "where": "train.py:29"}
    ranks = [step(0, "g"), skipped, MOVED, step(1, "g", rates=[0.05], kept=1), step(2, "g", rates=[0.05])]
    astray = {"kind": "out_of_step", "window": 1, "own": 2, "placed": True}
    single = [*alone(0, 0.1), *alone(1, 0.1), astray, *alone(2, 0.1)]
    report = Report(ranks=2, steps=3)
    Comparison(record(ranks, ranks), Run(ENDED, record(single)), NOBODY).judge(report)
    assert report.findings == []
    assert report.coverage["gradients"].startswith("not checked: a scaler leaves out other steps in one process")


def test_a_scaled_rate_is_a_note_and_hides_no_other_error() -> None:
    """Twice the rate for twice the batch is declared; a schedule that is over sooner is not."""
    note, *more = found([step(0, "g", rates=[0.2]), step(1, "g", rates=[0.2])], [*alone(0, 0.1), *alone(1, 0.1)])
    assert ((note.severity, note.step, note.factor), more) == (("note", 0, 2.0), [])
    error, note = found([step(0, "g", rates=[0.2]), step(1, "g", rates=[0.03])], [*alone(0, 0.1), *alone(1, 0.1)])
    assert (error.severity, error.step, error.factor) == ("error", 1, 0.3)
    assert (note.severity, note.step) == ("note", 0)


def test_the_group_whose_rate_differs_is_told() -> None:
    single = [{"kind": "rates", "event": 0, "optimizer": 0, "rates": [0.1, 0.01]}, step(0, "g")]
    (error,) = found([step(0, "g", rates=[0.1, 0.03])], single)
    assert (error.factor, "the rate 0.03, one process with 0.01" in error.cause) == (3.0, True)


def test_a_rate_of_zero_is_compared_too() -> None:
    (error,) = found([step(0, "g", rates=[0.1])], alone(0, 0.0))
    assert (error.severity, error.factor) == ("error", None)
    assert found([step(0, "g", rates=[0.0])], alone(0, 0.0)) == []


def given(rows: int) -> list[Event]:
    """What models get in two windows."""
    return [{"kind": "input", "window": one, "rows": [f"{one}.{row}" for row in range(rows)]} for one in (0, 1)]


@pytest.mark.parametrize(
    ("rows", "gradients", "severity"),
    [
        (8, AGREES, "error"),  # the batch of one process is that of all ranks
        (4, AGREES, "note"),  # that of one rank: it grows with their number, as the rate does
        (8, DECLARED, "note"),  # the gradients may be smaller by as much
    ],
)
def test_a_rate_is_scaled_where_the_batch_grows(rows: int, gradients: str, severity: str) -> None:
    ranks = [*given(4), step(0, "g", rates=[0.8]), step(1, "g", rates=[0.8])]
    notes = found(ranks, [*alone(0, 0.4), *alone(1, 0.4)])
    report = Report(ranks=2, steps=2, findings=notes, coverage={"gradients": gradients})
    own_pace = record([*given(rows), *alone(0, 0.4), *alone(1, 0.4)])
    rates.judge_scaled(record(ranks, ranks), lambda: own_pace, report)
    assert [(one.code, one.severity) for one in report.findings] == [("learning-rate-differs", severity)]
    assert (report.coverage.get("control") == REFUTED) == (severity == "error")


@pytest.mark.parametrize(("mine", "rows", "is_found"), [(0.02, 8, True), (0.01, 8, False), (0.02, 4, False)])
def test_settings_of_optimizers_are_those_of_one_process_at_as_many_samples(
    mine: float, rows: int, *, is_found: bool
) -> None:
    """A prior over a rank's own samples decays N times as much; where the batch grows, a script may scale it."""
    ours, theirs = ([step(i, "g", settings=[{"weight_decay": decay}]) for i in range(2)] for decay in (mine, 0.01))
    report, ranks = Report(ranks=2, steps=2, coverage={"gradients": AGREES}), [*given(4), *ours]
    rates.judge_settings(record(ranks, ranks), lambda: record([*given(rows), *theirs]), report)
    assert [one.code for one in report.findings] == (["update-differs"] if is_found else [])


def test_which_process_of_how_many_this_is_is_no_setting() -> None:
    group = {"lr": 0.1, "momentum": 0.9, "rank": 1, "world_size": 2, "ns_steps": 5}
    assert settings_of(group) == {"momentum": 0.9, "ns_steps": 5}


@pytest.mark.parametrize(("bias", "codes"), [(0.2, []), (0.7, ["learning-rate-differs"])])
def test_rates_are_compared_by_parameter_where_each_rank_s_optimizer_holds_others(
    bias: float, codes: list[str]
) -> None:
    """Each rank owns some parameters, each with a rate of its own."""

    def holds(rates: dict[str, float], kind: str) -> list[Event]:
        names: Event = {"kind": "names", "optimizer": 0, "names": [*rates], "groups": [*range(len(rates))]}
        taken = step(0, "g", rates=[*rates.values()])
        alone_: Event = {"kind": "rates", "event": 0, "optimizer": 0, "rates": [*rates.values()]}
        return [names, taken] if kind == "rank" else [names, alone_, taken]

    ranks = record(holds({"weight": 0.1, "head": 0.3}, "rank"), holds({"bias": bias}, "rank"))
    single = record(holds({"weight": 0.1, "bias": 0.2, "head": 0.3}, "alone"))
    told = [*rates.Rates(ranks, Run(ENDED, single), None, None, None).findings()]
    assert [one.code for one in told] == codes
    report = Report(ranks=2, steps=1)
    control.judge(ranks, report)
    assert [one for one in report.findings if one.code == "learning-rate-differs"] == []
