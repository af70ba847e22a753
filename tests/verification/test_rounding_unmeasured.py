"""Rounding is told from a mistake by measuring it, and where that is not enough, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from journals import Event, ended, step, stepped, trained

from samestep.verification.journal import value_path
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.judging.reference import Comparison
from samestep.verification.report import Report
from samestep.verification.runs import Ended

RIGHT = torch.tensor([3.0, 4.0])
FAILED = {"rank": 0, "exception": "OSError", "message": "no space left"}


def run(folder: Path, gradient: torch.Tensor | None, failure: dict[str, object] | None = None) -> Run:
    """One process; without a gradient it has failed before its step."""
    events: list[Event] = []
    if gradient is not None:
        value_path(folder, 0, 1).parent.mkdir(parents=True)
        torch.save({"w": gradient}, value_path(folder, 0, 1))
        events = [{"kind": "rates", "event": 0, "optimizer": 0, "rates": [0.1]}, step(0, "g", kept=1), ended()]
    outcome = Ended(code=int(gradient is None), hung=False, failure=failure, folder=folder)
    return Run(outcome, Record(folder, [Rank(0, events)]))


def two_ranks(folder: Path, apart: float) -> Record:
    ranks = run(folder, RIGHT + torch.tensor([5.0 * apart, 0.0]))
    first = [{"kind": "window", "number": 0, "others": {}}, step(0, "g", kept=1), stepped(0), ended()]
    return Record(ranks.record.folder, [Rank(0, first), Rank(1, [step(0, "g"), stepped(0), ended()])])


def judged(folder: Path, apart: float, again: Run, in_float64: tuple[Record, Run, Run] | None = None) -> Report:
    alone, record = run(folder / "alone", RIGHT), two_ranks(folder / "ranks", apart)
    report = Report(ranks=2)
    no_part = [run(folder / "part", None)]
    more = None if in_float64 is None else lambda: in_float64
    Comparison(record, alone, Others(lambda: again, lambda: no_part, list, in_float64=more)).judge(report)
    return report


@pytest.mark.parametrize(
    ("apart", "told"), [(1e-6, "agrees"), (1e-3, "not checked: rounding could not be measured"), (0.5, "differs")]
)
def test_what_rounding_might_explain_is_left_open_where_nobody_has_measured_it(
    tmp_path: Path, apart: float, told: str
) -> None:
    report = judged(tmp_path, apart, run(tmp_path / "again", None, FAILED))
    assert report.coverage["gradients"].startswith(told)
    assert bool(report.errors) == (told == "differs")


def test_a_measured_floor_decides(tmp_path: Path) -> None:
    assert judged(tmp_path / "1", 1e-3, run(tmp_path / "quiet", RIGHT)).errors
    noisy = run(tmp_path / "noisy", RIGHT * (1 + 5e-4))
    assert judged(tmp_path / "2", 1e-3, noisy).coverage["gradients"] == "agrees"


@pytest.mark.parametrize(("there", "told"), [(1e-12, "agrees"), (0.9e-3, "differs"), (None, "differs")])
def test_before_an_accusation_the_step_is_repeated_in_float64(tmp_path: Path, there: float | None, told: str) -> None:
    """Where it cannot be, as of a script that mixes types, what float32 shows decides."""
    alone = run(tmp_path / "alone64", RIGHT if there is not None else None)
    in_float64 = (two_ranks(tmp_path / "ranks64", there or 0.0), alone, alone)
    report = judged(tmp_path, 1e-3, run(tmp_path / "quiet", RIGHT), in_float64)
    assert report.coverage["gradients"] == told
    assert bool(report.errors) == (told == "differs")
    assert any("is rounding: in float64 it is" in line for line in report.remarks) == (told == "agrees")


@pytest.mark.parametrize(
    ("there", "told"),
    [(1e-12, "agrees"), (0.9e-3, "differs"), (None, "not checked: rounding alone is 1e-01 of a gradient")],
)
def test_a_step_that_rounding_hides_in_float32_is_judged_in_float64(
    tmp_path: Path, there: float | None, told: str
) -> None:
    alone = run(tmp_path / "alone64", RIGHT if there is not None else None)
    noisy = run(tmp_path / "noisy", RIGHT * 1.1)
    report = judged(tmp_path, 1e-3, noisy, (two_ranks(tmp_path / "ranks64", there or 0.0), alone, alone))
    assert report.coverage["gradients"].startswith(told)
    assert bool(report.errors) == (told == "differs")


def test_a_gradient_that_has_converged_is_not_judged_in_float64_either(tmp_path: Path) -> None:
    alone, noisy = run(tmp_path / "alone64", RIGHT), run(tmp_path / "noisy", RIGHT * 1.1)
    report = judged(tmp_path, 1e-3, noisy, (two_ranks(tmp_path / "ranks64", 0.3), alone, noisy))
    assert report.coverage["gradients"].startswith("not checked: rounding alone is 1e-01 of a gradient")
    assert not report.errors


@pytest.mark.parametrize(("gradient", "told"), [(0.0, "not checked: every gradient is zero"), (1.0, "agrees")])
def test_gradients_that_are_all_zero_were_not_compared(tmp_path: Path, gradient: float, told: str) -> None:
    gradients = [torch.zeros(2), torch.tensor([gradient, 0.0])]
    ranks, alone = trained(tmp_path / "ranks", gradients), trained(tmp_path / "alone", gradients)
    report = Report(ranks=2)
    Comparison(ranks.record, alone, Others(lambda: alone, list)).judge(report)
    assert report.coverage["gradients"].startswith(told)


@pytest.mark.parametrize(
    ("error", "told"),
    [(1e-3, "agrees"), (2e-2, "not checked: rounding alone"), (0.3, "differs")],
    ids=["rounding", "open", "a mistake"],
)
def test_gradients_that_are_computed_in_16_bits_are_judged_by_what_that_leaves(
    tmp_path: Path, error: float, told: str
) -> None:
    """The optimizer holds copies of 32 bits; the leaves of the graph tell the type."""
    ours = two_ranks(tmp_path / "ranks", error)
    events = ours.ranks[0].events
    events[:] = [{**one, "unit": 2**-11} if one["kind"] == "step" else one for one in events]
    whole, again = run(tmp_path / "whole", RIGHT), run(tmp_path / "again", RIGHT)
    report = Report(ranks=2)
    Comparison(ours, whole, Others(lambda: again, lambda: [run(tmp_path / "part", None)])).judge(report)
    assert report.coverage["gradients"].startswith(told)
