"""Where the run that measures rounding fails, a small difference is neither excused nor called one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from journals import Event, ended, step, stepped

from samestep.verification.journal import value_path
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.reference import Comparison
from samestep.verification.judging.single import Run
from samestep.verification.report import Report
from samestep.verification.runs import Ended

RIGHT = torch.tensor([3.0, 4.0])
FAILED = {"rank": 0, "exception": "OSError", "message": "no space left"}


def run(folder: Path, gradient: torch.Tensor | None, failure: dict[str, object] | None = None) -> Run:
    """One process; without a gradient it has failed before its step."""
    events: list[Event] = []
    if gradient is not None:
        value_path(folder, 0, 1).parent.mkdir(parents=True)
        torch.save([gradient], value_path(folder, 0, 1))
        events = [{"kind": "rates", "event": 0, "optimizer": 0, "rates": [0.1]}, step(0, "g", kept=1), ended()]
    outcome = Ended(code=int(gradient is None), hung=False, failure=failure, folder=folder)
    return Run(outcome, Record(folder, [Rank(0, events)]))


def judged(folder: Path, apart: float, again: Run) -> Report:
    alone = run(folder / "alone", RIGHT)
    ranks = run(folder / "ranks", RIGHT + torch.tensor([5.0 * apart, 0.0]))
    first = [{"kind": "window", "number": 0, "others": {}}, step(0, "g", kept=1), stepped(0), ended()]
    record = Record(ranks.record.folder, [Rank(0, first), Rank(1, [step(0, "g"), stepped(0), ended()])])
    report = Report(ranks=2)
    no_part = [run(folder / "part", None)]
    Comparison(record, alone, Others(lambda: again, lambda: no_part, list)).judge(report)
    return report


@pytest.mark.parametrize(
    ("apart", "told"), [(1e-6, "agrees"), (1e-3, "not checked: rounding could not be measured"), (0.5, "refuted")]
)
def test_what_rounding_might_explain_is_left_open_where_nobody_has_measured_it(
    tmp_path: Path, apart: float, told: str
) -> None:
    report = judged(tmp_path, apart, run(tmp_path / "again", None, FAILED))
    assert report.coverage["gradients"].startswith(told)
    assert bool(report.errors) == (told == "refuted")


def test_a_measured_floor_decides(tmp_path: Path) -> None:
    assert judged(tmp_path / "1", 1e-3, run(tmp_path / "quiet", RIGHT)).errors
    noisy = run(tmp_path / "noisy", RIGHT * (1 + 5e-4))
    assert judged(tmp_path / "2", 1e-3, noisy).coverage["gradients"] == "agrees"
