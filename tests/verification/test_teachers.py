"""A model that no optimizer holds and that steps change, a teacher or a target network, is state like any other."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import Event, step
from torch import nn

import samestep
from samestep import Report
from samestep.runtime.digest import digest
from samestep.verification.journal import TraceWriter, value_path
from samestep.verification.judging import evaluation, moved
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.recording.optimizers import Optimizers
from samestep.verification.runs import Ended

MEAN_TEACHER = """
    import copy, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), (y + teacher(x)) / 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() >= 0:
            for mine, new in zip(teacher.parameters(), student.parameters()):
                mine.data.mul_(0.5).add_(0.5 * new.detach())
    dist.destroy_process_group()
"""


def test_only_what_has_changed_is_kept_of_models_that_no_optimizer_holds(tmp_path: Path) -> None:
    student = nn.Linear(2, 1)
    teacher, frozen = copy.deepcopy(student), nn.Linear(3, 1)
    optimizers = Optimizers(TraceWriter(tmp_path, 0))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    optimizers.add(optimizer, "train.py:1")
    assert optimizers.values()["untrained"] == {}
    teacher.weight.data.mul_(0.5)
    late = nn.Linear(4, 1)
    kept = {id(one) for one in optimizers.values()["untrained"].values()}
    assert kept == {id(one) for one in (teacher.weight, *late.parameters())}
    assert {id(one) for one in frozen.parameters()} <= {id(one) for one in optimizers.untrained().values()}


@pytest.mark.parametrize("is_sharded", [True, False])
def test_an_average_has_one_number_where_each_rank_s_optimizer_holds_a_part(
    tmp_path: Path, *, is_sharded: bool
) -> None:
    """On ranks of a ZeRO by hand the trained model has parameters that no optimizer here holds, alone it has none."""
    student = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    average = copy.deepcopy(student)
    optimizers = Optimizers(TraceWriter(tmp_path, 0))
    optimizer = torch.optim.SGD(student[0].parameters() if is_sharded else student.parameters(), lr=0.1)
    optimizers.add(optimizer, "train.py:1")
    named = {id(one): name for name, one in optimizers.untrained().items()}
    assert named[id(average[0].weight)] == "model 1: 0.weight"
    assert named.get(id(student[1].weight)) == ("trained model 1: 1.weight" if is_sharded else None)


def test_a_teacher_is_put_back_where_steps_are_compared(tmp_path: Path) -> None:
    """The ranks' rate is scaled, so one process by itself comes to another teacher."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(MEAN_TEACHER), encoding="utf-8")
    report = samestep.verify(path, ranks=2)
    assert (report.verdict, [one.code for one in report.findings]) == ("same", ["learning-rate-differs"]), report
    path.write_text(textwrap.dedent(MEAN_TEACHER).replace(">= 0", "== 0"), encoding="utf-8")
    assert "gradient-differs" in [one.code for one in samestep.verify(path, ranks=2).errors]


@pytest.mark.parametrize(
    ("added", "samples", "is_found"),
    [
        ([1.0] * 8, 4, False),
        ([0.5] * 8, 2, False),  # of a schedule that is at another place in one process
        ([0.5] * 8, 4, True),  # one process, too, has as many samples in a step
        ([1.0] * 4 + [0.5] * 4, 2, True),  # half of the parameters are those of the step before
    ],
)
def test_an_average_that_takes_other_weights_than_in_one_process_is_found(
    tmp_path: Path, added: list[float], samples: int, *, is_found: bool
) -> None:
    def kept(folder: str, number: int, value: Any) -> Path:
        path = value_path(tmp_path / folder, 0, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)
        return tmp_path / folder

    begun, whole = torch.arange(8.0), torch.arange(8.0) + 0.1 * torch.arange(1.0, 9.0)
    ours = begun + torch.tensor(added) * (whole - begun)
    mine = kept("ranks", 2, {"buffers": {}, "untrained": {"model 1: w": ours}})
    alone = kept("alone", 0, {"buffers": {}, "before": {"model 1: w": begun}, "teachers": {"model 1: w": whole}})
    given: Event = {"kind": "input", "window": 1, "rows": ["a", "b"]}
    paced: Event = {**given, "rows": list("abcd"[:samples])}
    events = [step(0, "g"), given, step(1, "g"), {"kind": "window", "number": 2, "kept": 2}]
    record = Record(mine, [Rank(0, events), Rank(1, [{**one, "kept": None} for one in events])])
    moved_: Event = {"kind": "moved", "window": 2, "kept": 0}
    ended = Ended(code=0, hung=False, failure=None, folder=alone)
    report = Report(ranks=2, coverage={"gradients": "agrees"})
    own_pace = Record(alone, [Rank(0, [paced, step(1, "g")])])
    moved.judge(record, Run(ended, Record(alone, [Rank(0, [moved_])])), lambda: own_pace, report)
    assert [(one.code, one.step, one.where) for one in report.errors] == (
        [("parameters-diverged", 1, "train.py:30")] if is_found else []
    )


@pytest.mark.parametrize(("theirs", "is_found"), [(0.0, True), (1.0, False)])
def test_a_buffer_that_ranks_had_otherwise_before_the_step_is_their_own(
    tmp_path: Path, theirs: float, *, is_found: bool
) -> None:
    """A window that an evaluation keeps has two events, of which the first has no values."""

    def kept(folder: str, rank: int, number: int, value: Any) -> int:
        path = value_path(tmp_path / folder, rank, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)
        return number

    ranks = []
    for rank, begun in enumerate((0.0, theirs)):
        events: list[Event] = []
        for window in (0, 1):
            store = {"store": torch.full((4,), begun + window)}
            number = kept("ranks", rank, window, store if rank else {"buffers": store, "untrained": {}})
            of_rank = {"kept": None, "buffers": number} if rank else {"kept": number, "buffers": None}
            unkept = {"kind": "window", "number": window, "kept": None, "buffers": None}
            events += [unkept, {**unkept, **of_rank}, step(window, "g")]
        ranks.append(Rank(rank, events))
    number = kept("alone", 0, 0, {"buffers": {"store": torch.full((4,), 9.0)}, "before": {}, "teachers": {}})
    ended = Ended(code=0, hung=False, failure=None, folder=tmp_path / "alone")
    alone = Record(tmp_path / "alone", [Rank(0, [{"kind": "moved", "window": 1, "kept": number}])])
    report = Report(ranks=2, coverage={"gradients": "agrees"})
    moved.judge(Record(tmp_path / "ranks", ranks), Run(ended, alone), lambda: alone, report)
    assert [one.code for one in report.errors] == ["buffers-diverged"] * is_found


def swapped(folder: Path, value: torch.Tensor) -> Run:
    """One process that evaluates with a value which its steps have not made."""
    folder.mkdir()
    journal = TraceWriter(folder, 0)
    kept = journal.keep({"w": value})
    event = {"kind": "swapped", "window": 2, "kept": kept, "where": "train.py:40"}
    ended = Ended(code=0, hung=False, failure=None, folder=folder)
    return Run(ended, Record(folder, [Rank(0, [event])]))


@pytest.mark.parametrize(
    ("ranks", "one", "rounded", "is_found"),
    [
        (1.3, 1.0, 1.0001, True),  # the average of another rank
        (1.001, 1.0, 1.0001, False),
        (1.3, 1.0, 1.2, False),  # rounding alone takes it as far
        (2.0, 1.0, 1.0, False),  # a step has made it: the best so far, which is a choice
    ],
)
def test_an_average_to_evaluate_with_is_held_against_one_process_s(
    tmp_path: Path, ranks: float, one: float, rounded: float, *, is_found: bool
) -> None:
    values = {"parameters": {0: {"w": torch.full((4,), ranks)}}, "buffers": {}}
    kept = TraceWriter(tmp_path / "ranks", 0).keep(values)
    made = digest(torch.full((4,), 2.0))
    steps = [step(0, "g", parameters={"w": made}), {"kind": "window", "number": 2, "kept": kept}]
    record, report = Record(tmp_path / "ranks", [Rank(0, steps)]), Report(ranks=2)
    alone, again = (
        swapped(tmp_path / "one", torch.full((4,), one)),
        swapped(tmp_path / "rounded", torch.full((4,), rounded)),
    )
    evaluation.judge_swapped(record, alone, lambda: again, report)
    found = [(error.code, error.property, error.tensor, error.where) for error in report.errors]
    assert found == ([("parameters-diverged", "evaluation", "w", "train.py:40")] if is_found else [])
    searching = [{"kind": "evaluates", "phase": "1.1", "parameters": {"w": rank}, "loaded": None} for rank in "ab"]
    other = [steps[0], {"kind": "window", "number": 2, "kept": None}, searching[1]]
    two = [Rank(0, [*steps, searching[0]]), Rank(1, other)]
    apart = Report(ranks=2)
    evaluation.judge_swapped(Record(record.folder, two), alone, lambda: again, apart)
    assert apart.errors == []  # each rank tries others
