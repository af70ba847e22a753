"""What a person reads of a verification: the outcome first, then what was checked and what was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.cli import main
from samestep.verification.findings import DECISIVE, LEGS, NONE_SEEN, Finding
from samestep.verification.report import Report, headline, shown
from samestep.verification.verify import leaving_open

ALL = dict.fromkeys(DECISIVE, "identical")


def found(name: str, code: str | None = None, cause: str = "twice | as much") -> Finding:
    own = "gradient-scale" if name == "gradients" else LEGS[name].codes[0]
    return Finding(code=code or own, property=name, cause=cause, fix="divide it", where="train.py:7")


@pytest.mark.parametrize(
    ("findings", "coverage", "said"),
    [
        ([], ALL, "the same training"),
        ([], {}, "inconclusive"),
        ([found("gradients"), found("control")], ALL, "a different training: gradients, control"),
        ([found("communication", "hang")], ALL, "a different training: hang"),
        ([found("evaluation")], ALL, "the same training, evaluated differently"),
        (
            [found("evaluation"), found("checkpoint")],
            ALL,
            "the same training, evaluated and saved or resumed differently",
        ),
        ([found("evaluation")], {}, "evaluated differently; whether it is the same training is open"),
    ],
)
def test_the_headline_names_the_outcome(findings: list[Finding], coverage: dict[str, str], said: str) -> None:
    report = Report(ranks=2, coverage=dict(coverage))
    report.add(findings)
    assert headline(report) == said


def test_two_paragraphs_say_what_was_checked_and_what_was_not() -> None:
    report = Report(ranks=2, steps=3, coverage={**ALL, "gradients": "agrees as declared"}, script=("train.py",))
    report.margins["gradients"] = "with BatchNorm statistics of each rank's samples: worst error 1e-07"
    report.cover("evaluation", NONE_SEEN)
    text = " ".join(shown(report).split())
    assert text.startswith("train.py: the same training (2 ranks, 3 steps compared)")
    assert "checked: initial state, updates, parameters, data, control, communication agrees as declared:" in text
    assert "gradients (with BatchNorm statistics of each rank's samples" in text
    assert text.endswith("nothing to check: evaluation (none was seen)")
    assert "updates          identical" in shown(report, verbose=True)


def test_what_could_not_be_compared_is_said_with_its_reason() -> None:
    report = Report(ranks=2, coverage={**ALL, "gradients": "not checked: no order", "updates": "not checked: no order"})
    assert "not checked: gradients, updates (no order)" in shown(report)


def test_a_report_is_markdown_for_a_pull_request(tmp_path: Path) -> None:
    report = Report(ranks=2, coverage=dict(ALL))
    report.add([found("gradients")])
    told = report.as_markdown()
    assert told.startswith("### samestep verify: a different training: gradients")
    assert "**error `gradient-scale`** at `train.py:7`" in told
    assert "| gradients | differs |" in told
    (tmp_path / "nothing.py").write_text("print('nothing is trained here')", encoding="utf-8")
    assert main(["verify", "--markdown", str(tmp_path / "report.md"), str(tmp_path / "nothing.py")]) == 3
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("### samestep verify: inconclusive")


def test_what_verify_itself_fails_at_is_open_and_accuses_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(ranks=2, steps=1, coverage=dict.fromkeys(DECISIVE, "agrees"))
    with leaving_open(report):
        raise IndexError("list index out of range")
    assert report.verdict == "inconclusive"
    assert "samestep itself failed at test_report.py:" in str(report.inconclusive)
    assert "IndexError: list index out of range" in capsys.readouterr().err
