"""What `samestep verify` promises of scripts that use samestep: float64, bits as virtual ranks, kill and resume."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from journals import ended, record, step, stepped
from lazily import Lazily

from samestep import Report
from samestep.replicas import virtual_engine
from samestep.verification import claims
from samestep.verification.files import Files
from samestep.verification.judging.record import Run
from samestep.verification.runner import Runner
from samestep.verification.runs import Ended, Script
from samestep.verification.verify import examine

TRAIN = """
    import samestep, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(58, 8, generator=generator), torch.randint(0, 3, (58,), generator=generator)
    held_out = TensorDataset(x[:11], y[:11])
    with samestep.world(seed=1) as world:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        model = samestep.replicate(net, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        batches = samestep.shards(TensorDataset(x, y), world, batch_size=20, micro_batch_size=4)
        saved = {saved}
        state = samestep.checkpoint("run", world, every=50, data=batches, **saved)
        own = torch.Generator().manual_seed(world.rank)
        for epoch in state.epochs(3):
            for images, labels in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    scores = model(images)
                losses = nn.functional.cross_entropy(scores, labels, reduction="none")
                batches.mean(losses{times}).backward()
                if batches.step_ends:
                    samestep.clip_grad_norm_(model, 1.0)
                    optimizer.step(), schedule.step(), optimizer.zero_grad(), state.commit()
            right = lambda scores, labels: (scores.argmax(1) == labels).double().mean()
            evaluated = lambda batch: (model(batch[0]), batch[1])
            samestep.evaluate(evaluated, held_out, world, batch_size=4, metrics={{"right": right}})
"""
ALL = "dict(model=model, optimizer=optimizer, schedule=schedule)"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    """Of a script that is right, and of single claims on scripts that break them."""

    def script(saved: str = ALL, times: str = "") -> Script:
        path = tmp_path_factory.mktemp("script") / "train.py"
        path.write_text(textwrap.dedent(TRAIN.format(saved=saved, times=times)), encoding="utf-8")
        return Script(program=str(path))

    def runner(one: Script) -> Runner:
        folder = tmp_path_factory.mktemp("runs")
        return Runner(script=one, ranks=2, folder=folder, files=Files([], folder), still_s=60.0, say=lambda _: None)

    def in_float64() -> Report:
        report = Report(ranks=2)
        claims.judge_in_float64(runner(script(times=" * (1 + 1e-6 * world.rank)")), 6, report)
        return report

    def bit_for_bit() -> Report:
        report = Report(ranks=2)
        claims.judge_virtual_ranks(runner(script(times=" * torch.rand((), generator=own)")), 2, 6, report)
        return report

    def resumed() -> Report:
        report, forgetful = Report(ranks=2), runner(script(saved="dict(model=model, schedule=schedule)"))
        claims.judge_resume(forgetful, forgetful.recorded("recording", 2).record, report)
        return report

    makers = {
        "2 ranks": lambda: examine(script(), 2),
        "3 ranks": lambda: examine(script(), 3),
        "in float64": in_float64,
        "bit for bit": bit_for_bit,
        "resumed": resumed,
    }
    return Lazily(lambda name: makers[name]())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.prove)])
def test_a_training_with_samestep_is_the_same_also_in_float64_and_through_a_kill(
    reports: Lazily[Report], size: int
) -> None:
    report = reports[f"{size} ranks"]
    report.require_same()
    assert any(remark.startswith("in float64 ranks and one process agree") for remark in report.remarks), report
    assert report.coverage["checkpoint"] == "identical"
    assert "rank 0 killed after" in report.margins["checkpoint"]
    assert not Path("run").exists()  # which is what the script names; every run saves into a folder of its own


def test_as_virtual_ranks_processes_and_one_have_the_same_bits_where_their_number_is_a_power_of_two(
    reports: Lazily[Report],
) -> None:
    (two,) = [remark for remark in reports["2 ranks"].remarks if "virtual ranks" in remark]
    assert "2 processes and one have the same bits in all gradients and parameters (9 steps" in two
    three = Report(ranks=3)
    claims.judge_virtual_ranks(None, 3, 6, three)  # type: ignore[arg-type]  # nothing is run
    assert three.remarks == ["not compared bit for bit with virtual ranks: 3 is no power of two"]


def test_an_error_in_the_sixth_digit_shows_in_float64(reports: Lazily[Report]) -> None:
    (found,) = reports["in float64"].errors
    assert found.code == "gradient-differs"


def test_what_depends_on_the_process_has_other_bits_as_virtual_ranks(reports: Lazily[Report]) -> None:
    (found,) = reports["bit for bit"].errors
    assert (found.code, found.step) == ("gradient-differs", 0)
    assert "2 processes and one have other bits" in found.cause


@pytest.mark.parametrize("by_us", [True, False])
def test_only_a_rank_that_was_killed_behind_a_save_must_go_on_from_there(tmp_path: Path, by_us: bool) -> None:
    """Killed before it, for want of memory say, it rightly begins at the beginning."""
    killed = [step(0, "g"), stepped(0), *([{"kind": "killed"}] if by_us else [])]
    whole = [step(0, "g"), stepped(0), step(1, "h"), stepped(1), ended()]
    signal = {"rank": 0, "exception": "Signal", "message": "it was killed by SIGKILL"}

    class Runs:
        folder = tmp_path

        def recorded(self, name: str, ranks: int, **_: object) -> Run:
            first = "killed" in name
            failure = signal if first else None
            events = killed if first else whole
            return Run(Ended(code=0, hung=False, failure=failure, folder=tmp_path), record(*[events] * ranks))

    report = Report(ranks=2)
    claims.judge_resume(Runs(), record(whole, whole), report)  # type: ignore[arg-type]
    assert [finding.code for finding in report.errors] == (["checkpoint-inexact"] if by_us else [])
    assert by_us or report.coverage["checkpoint"] == "not checked: Signal: it was killed by SIGKILL"


def test_an_optimizer_that_is_not_saved_is_found_by_the_resume(reports: Lazily[Report]) -> None:
    (found,) = reports["resumed"].errors
    assert found.code == "checkpoint-inexact"
    assert "other bits" in found.cause


@pytest.mark.parametrize("length", [len(virtual_engine._CHANGED), 3000])
def test_a_reason_is_told_to_its_end_or_shows_that_it_goes_on(tmp_path, length):
    message = virtual_engine._CHANGED.ljust(length, "-")
    failure = {"exception": "StepError", "message": message}
    reason = claims.failed(Run(Ended(code=1, hung=False, failure=failure, folder=tmp_path), record([ended()])))
    assert "which stands under `if batches.step_ends:`" in reason
    assert reason.endswith("…") == (length == 3000)
    assert len(reason) < 600
