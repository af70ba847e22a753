"""Scripts that are killed behind a save, and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from journals import Event, record, step, stepped

import samestep
from samestep.verification import restart
from samestep.verification.findings import unchecked
from samestep.verification.judging import storage
from samestep.verification.judging.record import Record, Run
from samestep.verification.report import Report
from samestep.verification.runner import Runner
from samestep.verification.runs import Ended

STATE: dict[str, Any] = {
    "parameters": {"w": "p2"},
    "buffers": {},
    "optimizers": [{"number": 0, "state": "momentum", "rates": [0.1]}],
    "averaged": {},
}
SAVED = {"kind": "save", "path": "last.pt", "digests": {"w": "p2"}, "event": 2, "where": "train.py:40", "state": STATE}
MADE: Event = {"kind": "optimizer", "number": 0, "name": "SGD", "where": "train.py:11"}
KILLED: Event = {"kind": "killed"}


def taken(*numbers: int, first: int = 0, **more: Any) -> list[Event]:
    """Steps, each with a row of its own; those of a second start count from 0."""
    events: list[Event] = []
    for number in numbers:
        own = number - first
        events += [
            {"kind": "input", "window": own, "rows": [f"row {number}"]},
            {**step(number, "g", **more), "event": own, "window": own},
            {**stepped(number), "event": own},
        ]
    return events


def loaded(digest: str = "p2", state: str | None = "momentum") -> list[Event]:
    optimizers = [{"number": 0, "state": state, "rates": [0.1]}]
    about: Event = {"kind": "resumed", "path": "last.pt", "event": 0, "buffers": {}, "averaged": {}}
    return [
        MADE,
        {"kind": "load", "path": "last.pt", "digests": {"w": digest}, "event": 0, "where": "train.py:21"},
        {**about, "optimizers": optimizers},
    ]


class Twice:
    """A Runner whose second start comes to these events; it notes what it was asked for."""

    def __init__(self, *again: Event, before: str = "g") -> None:
        self.again = record([*again])
        self.before = before  # the gradients of the steps up to the save
        self.asked: list[tuple[int, dict[str, Any], dict[str, Any]]] = []

    def started_twice(self, step: int, first: dict[str, Any], second: dict[str, Any]) -> tuple[Run, Run]:
        self.asked.append((step, first, second))
        before = taken(0, 1, gradients={"w": self.before})
        killed = record([MADE, *before, SAVED, *taken(2), KILLED])
        ended = Ended(code=0, hung=False, failure=None, folder=Path("/nowhere"))
        return Run(ended, killed), Run(ended, self.again)


WITHOUT_A_STOP = record([*taken(0, 1), SAVED, *taken(2, 3, 4), {"kind": "may_load"}])


def judged(runner: Twice, whole: Record = WITHOUT_A_STOP) -> Report:
    report = Report(ranks=1)
    report.cover("checkpoint", unchecked(storage.NOT_LOADED))
    restart.judge(cast("Runner", runner), whole, {"steps": 64}, report)
    return report


def test_a_second_start_that_goes_on_as_without_a_stop_is_proved() -> None:
    runner = Twice(*loaded(), *taken(2, 3, 4, first=2))
    report = judged(runner)
    assert (report.findings, report.coverage["checkpoint"]) == ([], "identical")
    assert report.margins["checkpoint"].endswith("started again; it goes on with step 2")
    assert runner.asked == [(3, {"steps": 64, "killed_behind": 3}, {"steps": 3, "passes": 0})]


def test_a_schedule_that_begins_again_is_found_where_the_rates_part() -> None:
    (error,) = judged(Twice(*loaded(), *taken(2, first=2), *taken(3, first=2, rates=[0.4]))).errors
    assert (error.code, error.where) == ("checkpoint-inexact", "train.py:21")
    assert "it takes step 3 with the learning rate 0.4, and without the stop it is 0.1" in error.cause


def test_state_that_does_not_come_back_is_found() -> None:
    (error,) = judged(Twice(*loaded(state=None), *taken(2, first=2))).errors
    assert error.cause.startswith("rank 0 was killed behind step 2, and the script started again: rank 0 goes on")
    assert "the optimizer's state did not come back" in error.cause


def test_other_bits_from_the_same_samples_are_found() -> None:
    again = [one | ({"gradients": {"w": "other"}} if one["kind"] == "step" else {}) for one in taken(2, first=2)]
    (error,) = judged(Twice(*loaded(), *again)).errors
    assert (error.tensor, "other bits in w" in error.cause) == ("w", True)


def test_other_bits_tell_nothing_of_a_script_that_does_not_repeat_its_own() -> None:
    again = [one | ({"gradients": {"w": "other"}} if one["kind"] == "step" else {}) for one in taken(2, first=2)]
    assert judged(Twice(*loaded(), *again, before="of another sum")).findings == []


def test_what_a_start_draws_is_no_draw_of_the_step() -> None:
    def draw(window: int, where: str, digest: str) -> Event:
        return {"kind": "draw", "place": f"{window}|{where}|1", "digest": digest}

    whole = record([*WITHOUT_A_STOP.ranks[0].events, draw(0, "train.py:9", "data"), draw(2, "train.py:22", "noise")])
    begun = [*loaded(), draw(0, "train.py:9", "data"), *taken(2, 3, 4, first=2)]
    assert judged(Twice(*begun, draw(0, "train.py:22", "noise")), whole).findings == []
    (note,) = judged(Twice(*begun, draw(0, "train.py:22", "other")), whole).findings
    assert note.severity == "note"


def test_other_samples_are_a_note() -> None:
    again = [{**one, "rows": ["row 9"]} if one["kind"] == "input" else one for one in taken(2, first=2)]
    report = judged(Twice(*loaded(), *again))
    (note,) = report.findings
    assert (note.severity, report.coverage["checkpoint"]) == ("note", "agrees")
    assert "from step 2 on it has other samples" in note.cause


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (taken(0, 1), "killed behind a save and started again, the script loads nothing of it"),
        ([*loaded("p9"), *taken(0, 1)], "killed behind a save and started again, the script loads nothing of it"),
        (loaded(), "killed behind a save and started again, the script takes no step"),
    ],
)
def test_a_script_that_does_not_resume_is_not_accused(again: list[Event], why: str) -> None:
    report = judged(Twice(*again))
    assert (report.findings, report.coverage["checkpoint"]) == ([], unchecked(why))


@pytest.mark.parametrize(
    "whole",
    [
        record([*taken(0, 1), SAVED, *taken(2, 3, 4)]),
        record([*taken(0, 1), SAVED, {"kind": "may_load"}]),
        record([*taken(0, 1), {**SAVED, "digests": {"x": "of something else"}}, *taken(2), {"kind": "may_load"}]),
    ],
    ids=["no code to load", "saved at the end", "not what is trained"],
)
def test_where_there_is_nothing_to_resume_nothing_is_started(whole: Record) -> None:
    runner = Twice()
    assert judged(runner, whole).coverage["checkpoint"] == unchecked(storage.NOT_LOADED)
    assert runner.asked == []


# --- whole scripts ---

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
begun = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    begun = state["epoch"]
ddp = DistributedDataParallel(model)
for epoch in range(begun, 6):
    order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(32):
        optimizer.zero_grad()
        ddp(x[rows[rank::world]]).square().mean().backward()
        optimizer.step()
    schedule.step()
    if rank == 0:
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.save({"epoch": epoch + 1} | {key: one.state_dict() for key, one in state.items()}, "last.tmp")
        os.replace("last.tmp", "last.pt")
    dist.barrier()
dist.destroy_process_group()
"""
OPTIMIZER = '    optimizer.load_state_dict(state["optimizer"])\n'
SCHEDULE = '    schedule.load_state_dict(state["schedule"])\n'


def verified(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    (folder / "train.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    report = samestep.verify("train.py")
    assert [one.name for one in folder.iterdir()] == ["train.py"]  # the files are as before
    return report


def test_a_script_that_forgets_its_optimizer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = verified(tmp_path, SCRIPT.replace(OPTIMIZER, ""), monkeypatch).errors
    assert (error.code, error.where) == ("checkpoint-inexact", "train.py:15")
    assert "the optimizer's state did not come back" in error.cause


@pytest.mark.prove
def test_a_script_that_resumes_exactly_is_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = verified(tmp_path, SCRIPT, monkeypatch)
    report.require_same()
    assert report.coverage["checkpoint"] == "identical"


@pytest.mark.prove
def test_a_script_that_forgets_its_schedule_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = verified(tmp_path, SCRIPT.replace(SCHEDULE, ""), monkeypatch).errors
    assert error.cause.endswith("the schedule begins again")
