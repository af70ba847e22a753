"""Learning rates of N ranks and of one process, where a schedule moves on once for each rank."""

from __future__ import annotations

from pathlib import Path

from journals import Event, record, step

from samestep.verification.findings import Finding
from samestep.verification.judging.others import Others
from samestep.verification.judging.reference import Comparison
from samestep.verification.judging.single import Run
from samestep.verification.report import Report
from samestep.verification.runs import Ended

MOVED: Event = {"kind": "scheduler", "where": "train.py:31"}
NOBODY = Others(lambda: Run(ENDED, record()), list, list)
ENDED = Ended(code=0, hung=False, failure=None, folder=Path("/nowhere"))


def alone(event: int, rate: float) -> list[Event]:
    return [{"kind": "rates", "event": event, "optimizer": 0, "rates": [rate]}, step(event, "g")]


def found(ranks: list[Event], single: list[Event]) -> list[Finding]:
    report = Report(ranks=2, steps=3)
    Comparison(record(ranks, ranks), Run(ENDED, record(single)), NOBODY).judge(report)
    return report.findings


def test_rates_are_compared_after_as_many_steps_of_the_schedule() -> None:
    ranks = [
        step(0, "g", rates=[0.8]),
        MOVED,
        MOVED,
        step(1, "g", rates=[0.2]),
        MOVED,
        MOVED,
        step(2, "g", rates=[0.05]),
    ]
    single = [*alone(0, 0.8), MOVED, *alone(1, 0.4), MOVED, *alone(2, 0.2)]
    (note,) = found(ranks, single)
    assert (note.code, note.severity, note.where) == ("learning-rate-differs", "note", "train.py:31")


def test_a_rate_that_no_step_of_the_schedule_explains_is_an_error() -> None:
    ranks = [
        step(0, "g", rates=[0.8]),
        MOVED,
        MOVED,
        step(1, "g", rates=[0.3]),
        MOVED,
        MOVED,
        step(2, "g", rates=[0.05]),
    ]
    single = [*alone(0, 0.8), MOVED, *alone(1, 0.4), MOVED, *alone(2, 0.2)]
    (error,) = found(ranks, single)
    assert (error.severity, error.step, error.factor) == ("error", 1, 1.5)


def test_rates_that_a_script_sets_itself_are_compared_step_by_step() -> None:
    ranks = [step(0, "g", rates=[0.8]), step(1, "g", rates=[0.4])]
    assert found(ranks, [*alone(0, 0.8), *alone(1, 0.4)]) == []
    (error,) = found(ranks, [*alone(0, 0.8), *alone(1, 0.5)])
    assert (error.step, error.factor) == (1, 0.8)


def test_steps_that_a_scaler_leaves_out_on_one_side_only_are_not_compared() -> None:
    """One process has gradients of another size, so its scaler finds another scale, and its schedule lags behind."""
    skipped = {"kind": "scaler", "window": 1, "scale": 65536.0, "skipped": True, "where": "train.py:29"}
    ranks = [step(0, "g"), skipped, MOVED, step(1, "g", rates=[0.05], kept=1), step(2, "g", rates=[0.05])]
    astray = {"kind": "out_of_step", "window": 1, "own": 2}
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
