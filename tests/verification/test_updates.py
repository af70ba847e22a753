"""Whether optimizers make the update that one process makes from the same state, gradients and rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import Event, call, record, step, stepped, trained

from samestep.verification.journal import value_path
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.judging.updates import Updates
from samestep.verification.report import Report

BEFORE = torch.tensor([1.0, 2.0, -1.0, 0.5])
UPDATE = torch.tensor([0.1, -0.2, 0.05, 0.3])
MOMENTUM = torch.tensor([1.0, -2.0, 0.5, 3.0])


def stepping(folder: Path, after: torch.Tensor, **state: Any) -> Run:
    """A process that has taken one step, and kept the parameter and its state behind it."""
    run = trained(folder, [torch.ones(4)])
    torch.save({"parameters": {0: {"w": BEFORE}}, "buffers": {}, "states": {}}, value_path(folder, 0, 7))
    torch.save({"parameters": {"w": after}, "states": {"w": state}}, value_path(folder, 0, 8))
    kept: list[Event] = [
        {"kind": "window", "number": 0, "kept": 7, "others": {}},
        {"kind": "updated", "event": 0, "kept": 8, "evaluations": 0},
        step(0, "g", kept=0),
        stepped(0),
    ]
    return replace(run, record=Record(folder, [Rank(0, kept)]))


def judged(
    folder: Path, mine: torch.Tensor, right: torch.Tensor, again: torch.Tensor | None = None, **states: Any
) -> Report:
    ours = stepping(folder / "ranks", mine, **states.get("ours", {})).record
    other = Rank(1, [{**event, "kept": None} if "kept" in event else event for event in ours.ranks[0].events])
    whole = stepping(folder / "alone", right, **states.get("alone", {}))
    permuted = stepping(folder / "again", right if again is None else again, **states.get("alone", {}))
    report = Report(ranks=2)
    Updates(Record(ours.folder, [ours.ranks[0], other]), whole, Others(lambda: permuted, list)).judge(report)
    return report


def test_the_same_update_is_proved(tmp_path: Path) -> None:
    state = {"ours": {"momentum": MOMENTUM, "step": 3}, "alone": {"momentum": MOMENTUM.clone(), "step": 3}}
    report = judged(tmp_path, BEFORE + UPDATE, BEFORE + UPDATE, **state)
    assert (report.findings, report.coverage["updates"]) == ([], "identical")


def test_an_update_that_is_multiplied_by_the_number_of_ranks_is_found(tmp_path: Path) -> None:
    (found,) = judged(tmp_path, BEFORE + 2 * UPDATE, BEFORE + UPDATE).findings
    assert (found.code, found.tensor, found.factor, found.where) == (
        "update-differs",
        "w",
        pytest.approx(2.0),
        "train.py:30",
    )
    assert "2 is the number of ranks" in found.cause


@pytest.mark.parametrize(
    ("times", "rows", "severity"),
    [(2.0, 4, "note"), (1.25, 4, "note"), (2.0, 8, "error"), (3.0, 4, "error")],
    ids=["scaled", "while warming up", "batches of all ranks", "by more than their number"],
)
def test_code_that_steps_by_hand_may_scale_its_rate_with_the_ranks(
    tmp_path: Path, times: float, rows: int, severity: str
) -> None:
    ours = stepping(tmp_path / "ranks", BEFORE + times * UPDATE).record
    whole = stepping(tmp_path / "alone", BEFORE + UPDATE)

    def given(count: int) -> Event:
        return {"kind": "input", "window": 0, "rows": [str(row) for row in range(count)]}

    first = [given(4), *({**one, "by_hand": True} if one["kind"] == "step" else one for one in ours.ranks[0].events)]
    other = [{**event, "kept": None} if "kept" in event else event for event in first]
    own = Record(tmp_path, [Rank(0, [given(rows), step(0, "g")])])
    report = Report(ranks=2)
    others = Others(lambda: whole, list, own_pace=lambda: own)
    Updates(Record(ours.folder, [Rank(0, first), Rank(1, other)]), whole, others).judge(report)
    assert [one.severity for one in report.findings] == [severity]


def test_another_update_is_found_unless_another_order_of_the_samples_makes_it_too(tmp_path: Path) -> None:
    """A state that the optimizer keeps elsewhere is not put back, and differs by what rounding has made of it."""
    mine, right = BEFORE + UPDATE * torch.tensor([1.0, 1.0, 1.0, 1.01]), BEFORE + UPDATE
    assert [one.code for one in judged(tmp_path / "1", mine, right).findings] == ["update-differs"]
    again = BEFORE + UPDATE * torch.tensor([1.01, 1.0, 1.0, 1.0])
    assert not judged(tmp_path / "2", mine, right, again).findings


@pytest.mark.parametrize(("ours", "right"), [(MOMENTUM, MOMENTUM / 2), (4, 3)])
def test_another_state_behind_the_step_is_found(tmp_path: Path, ours: Any, right: Any) -> None:
    state = {"ours": {"kept": ours}, "alone": {"kept": right}}
    (found,) = judged(tmp_path, BEFORE + UPDATE, BEFORE + UPDATE, **state).findings
    assert "the state 'kept' of w" in found.cause


@pytest.mark.parametrize(("moved", "is_found"), [(1e-17, False), (1e-5, True)])
def test_an_update_that_is_nearly_zero_is_held_against_the_usual_one(
    tmp_path: Path, moved: float, *, is_found: bool
) -> None:
    """The shift behind a normalisation: its gradient is zero, and its value what rounding has made of it."""
    ours, whole = stepping(tmp_path / "ranks", BEFORE).record, stepping(tmp_path / "alone", BEFORE)
    for folder, times in ((ours.folder, 1.0), (whole.record.folder, 1.02)):
        shift, zeros = torch.full((4,), moved * times), torch.zeros(4)
        begun = {"parameters": {0: {"w": BEFORE, "shift": zeros}}, "buffers": {}, "states": {}}
        torch.save(begun, value_path(folder, 0, 7))
        torch.save({"parameters": {"w": BEFORE + UPDATE, "shift": shift}, "states": {}}, value_path(folder, 0, 8))
    other = Rank(1, [{**event, "kept": None} if "kept" in event else event for event in ours.ranks[0].events])
    report = Report(ranks=2)
    Updates(Record(ours.folder, [ours.ranks[0], other]), whole, Others(lambda: whole, list)).judge(report)
    assert [one.tensor for one in report.errors] == ["shift"] * is_found


def test_a_parameter_that_no_step_moves_proves_nothing(tmp_path: Path) -> None:
    assert judged(tmp_path, BEFORE, BEFORE).coverage["updates"] == "not checked: no step changes a parameter"


@pytest.mark.parametrize("is_known", [True, False])
def test_an_optimizer_that_averages_in_its_step_is_judged_where_the_ranks_own_gradients_are_known(
    tmp_path: Path, *, is_known: bool
) -> None:
    """One of a ZeRO by hand: before the step each rank has a gradient of its own, and one process that of all."""
    ours = stepping(tmp_path / "ranks", BEFORE + UPDATE).record
    own = {"own": 9} if is_known else {}
    first = [{**event, **(own if event["kind"] == "step" else {})} for event in ours.ranks[0].events]
    second = [
        {**event, "kept": None, **({"gradients": {"w": "other"}} if event["kind"] == "step" else {})} for event in first
    ]
    for rank in range(2):
        value_path(ours.folder, rank, 9).parent.mkdir(exist_ok=True)
        torch.save({"w": torch.ones(4)}, value_path(ours.folder, rank, 9))
    whole, report = stepping(tmp_path / "alone", BEFORE + 2 * UPDATE), Report(ranks=2)
    Updates(Record(ours.folder, [Rank(0, first), Rank(1, second)]), whole, Others(lambda: whole, list)).judge(report)
    assert [one.code for one in report.errors] == (["update-differs"] if is_known else [])
    assert is_known or report.coverage["updates"].startswith("not checked")


@pytest.mark.parametrize(("factor", "is_found"), [(1.0, False), (0.5, True)], ids=["linear", "not linear"])
def test_parameters_that_are_averaged_behind_a_step_are_those_of_one_process_or_are_found(
    tmp_path: Path, factor: float, *, is_found: bool
) -> None:
    """What a rank has made of them by itself, before they were averaged, is held against nothing."""
    ours = stepping(tmp_path / "ranks", BEFORE - UPDATE).record
    average = {"parameters": {0: {"w": BEFORE + factor * UPDATE}}, "buffers": {}, "states": {}}
    torch.save(average, value_path(ours.folder, 0, 9))
    behind: list[Event] = [{"kind": "window", "number": 1, "kept": 9, "others": {}}, step(1, "h"), stepped(1)]
    first = [*ours.ranks[0].events, *behind]
    own = [{**event, "kept": None} if "kept" in event else event for event in first]
    other = [
        {**event, "gradients": {"w": "other"}} if event["kind"] == "step" and event["event"] == 0 else event
        for event in own
        if event["kind"] != "stepped"
    ]
    record_of = Record(ours.folder, [Rank(0, first), Rank(1, [*other, stepped(0, "q"), stepped(1)])])
    whole, report = stepping(tmp_path / "alone", BEFORE + UPDATE), Report(ranks=2)
    Updates(record_of, whole, Others(lambda: whole, list)).judge(report)
    assert [one.code for one in report.errors] == (["update-differs"] if is_found else [])
    assert is_found or report.coverage["updates"].startswith("not checked: at step 0 each rank steps with a gradient")


def test_state_that_each_rank_carries_by_itself_is_not_held_against_one_process() -> None:
    """What random-k compression has not sent yet."""
    told = [{"kind": "updated", "event": 0, "kept": None, "carried": {"w": [name]}} for name in "ab"]
    own = record(*([step(0, "g"), stepped(0), one] for one in told))
    assert own.carries_apart(own.ranks[0].steps[0])
    alike = record(*([step(0, "g"), stepped(0), told[0]] for _ in range(2)))
    assert not alike.carries_apart(alike.ranks[0].steps[0])
    owners = [{**one, "carried": {name: ["a"]}} for one, name in zip(told, "wv", strict=True)]
    dealt = record(*([step(0, "g"), stepped(0), one] for one in owners))  # each has the state of its own parameters
    assert not dealt.carries_apart(dealt.ranks[0].steps[0])


@pytest.mark.parametrize(("dtype", "unit"), [("float16", 2**-11), ("bfloat16", 2**-8), ("float32", 0.0)])
def test_what_ranks_reduce_in_16_bits_is_rounded_so(dtype: str, unit: float) -> None:
    sent = record([call("train.py:9", "reduce_scatter_tensor", dtypes=[dtype]), step(0, "g"), stepped(0)])
    assert sent.sent_in(sent.ranks[0].steps[0]) == unit
