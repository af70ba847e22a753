"""`samestep verify` on whole scripts, with real ranks: a few of the zoo, which `make zoo` runs whole, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lazily import Lazily

import samestep
from samestep import Report, UsageError
from samestep.verification.pages import PAGES

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "zoo"

BROKEN = {  # directory -> code, and a text of the culprit's line
    "ddp-bypassed": ("gradients-not-synchronised", "model.module("),
    "loss-summed": ("gradient-scale", "backward()"),
    "iterable-not-split-by-worker": ("samples-repeated", "DataLoader("),
    "modules-from-set": ("parameter-order-differs", ""),
    "micro-batch-token-means": ("gradient-differs", "loss.backward()"),
    "mean-of-rank-accuracies": ("evaluation-inexact", ""),
}
HEALTHY = ("accumulation_no_sync", "gan", "own_spawning", "batchnorm_local", "samestep_micro_batches")

CUT = """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        {imports}
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
        loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False))
        model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 3))
        {wrap}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x, y in loader:
            optimizer.zero_grad()
            {loss}.backward()
            {clip}
            optimizer.step()
        dist.destroy_process_group()
"""
SHARDED = {
    "imports": "from torch.distributed.fsdp import fully_shard",
    "wrap": "fully_shard(model[0]), fully_shard(model)",
    "loss": "(model(x) - y).square().mean()",
    "clip": "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
}
SUMMED = SHARDED | {"loss": "(model(x) - y).square().sum()", "clip": ""}
TENSOR_PARALLEL = SHARDED | {
    "imports": "from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module",
    "wrap": "parallelize_module(model[2], dist.init_device_mesh('cpu', (dist.get_world_size(),)), ColwiseParallel())",
}
FLAT = SHARDED | {
    "imports": "from torch.distributed.fsdp import FullyShardedDataParallel",
    "wrap": "model = FullyShardedDataParallel(model, device_id=torch.device('cpu'))",
    "clip": "",
}
SERVES = """
        import pathlib, socket, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        world = dist.get_world_size()
        marker = pathlib.Path(__file__).with_suffix(".was_here")
        other, mine = socket.socket(), socket.socket()
        other.bind(("127.0.0.1", 0))
        {once}
            if dist.get_rank() == 1:
                marker.touch()
                mine.bind(other.getsockname())  # of a progress page, say
        dist.barrier()
        data = torch.utils.data.TensorDataset(torch.randn(64, 3))
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
        for (x,) in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        dist.destroy_process_group()
"""

SCRIPTS = {
    "cut by fully_shard": CUT.format(**SHARDED),
    "cut by fully_shard, summed": CUT.format(**SUMMED),
    "cut by tensor parallelism": CUT.format(**TENSOR_PARALLEL),
    "cut by FSDP1": CUT.format(**FLAT),
    "trains nothing": "print('x' * 5_000_000)",
    "fails alone too": "raise RuntimeError('no such file')",
    "wants a terminal": "input('learning rate? ')",
    "fails on one rank": """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise RuntimeError("only here")
        dist.barrier()
    """,
    "finds its port taken by another program": SERVES.format(once="if not marker.exists() and world > 1:"),
    "takes its own port twice": SERVES.format(once="if world > 1:"),
    "has more batches on one rank": """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        size = dist.get_world_size()
        for step in range(10 - dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(8, 10)).square().mean().backward()
            optimizer.step()
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
    """,
    # the sleep is the fault itself: a rank that never comes; the run is ended long before it is over
    "waits for ever": """
        import datetime, time, torch, torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.barrier()
    """,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {name: ZOO / name / "buggy.py" for name in BROKEN} | {n: ZOO / "healthy" / f"{n}.py" for n in HEALTHY}
    for name, text in SCRIPTS.items():
        scripts[name] = folder / f"{name.replace(' ', '_')}.py"
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        scripts[name].write_text("\n".join(line[indent:] for line in lines), encoding="utf-8")
    waits = {"waits for ever": 12.0}
    steps = {"cut by FSDP1": 3}  # of its four
    return Lazily(lambda name: samestep.verify(scripts[name], timeout=waits.get(name, 60.0), steps=steps.get(name)))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_script_is_found_and_its_line_named(reports: Lazily[Report], name: str) -> None:
    code, text = BROKEN[name]
    (found, *_) = [finding for finding in reports[name].errors if finding.code == code]
    assert reports[name].verdict == "different"
    path, _, line = (found.where or ":0").rpartition(":")
    if text:
        assert text in Path(path).read_text(encoding="utf-8").splitlines()[int(line) - 1]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_is_the_same_training(reports: Lazily[Report], name: str) -> None:
    reports[name].require_same()
    assert reports[name].steps > 0
    assert reports[name].coverage["gradients"] in {"agrees", "agrees as declared"}


def test_where_nothing_is_trained_nothing_can_be_said(reports: Lazily[Report]) -> None:
    report = reports["trains nothing"]
    assert (report.verdict, report.findings) == ("inconclusive", [])
    assert "there is no training to compare" in str(report)
    assert report.coverage["communication"] == "not checked: the ranks send each other nothing"


@pytest.mark.parametrize(
    ("name", "why"), [("fails alone too", "no such file"), ("wants a terminal", "EOF when reading a line")]
)
def test_what_fails_alone_too_is_no_difference(reports: Lazily[Report], name: str, why: str) -> None:
    report = reports[name]
    assert (report.verdict, report.errors) == ("inconclusive", [])
    assert report.inconclusive is not None
    assert why in report.inconclusive


def test_ranks_with_unlike_numbers_of_batches_are_told_where_each_was(reports: Lazily[Report]) -> None:
    report = reports["has more batches on one rank"]
    (found,) = report.errors
    assert found.code == "collective-mismatch"
    assert "backward()" in found.cause
    assert "dist.all_reduce(torch.zeros(1))" in found.cause
    assert "samestep.shards" in (found.fix or "")
    assert report.coverage["communication"] == "refuted"


def test_a_port_that_another_program_has_let_go_is_no_difference(reports: Lazily[Report]) -> None:
    reports["finds its port taken by another program"].require_same()


def test_a_port_that_the_script_takes_twice_is_one(reports: Lazily[Report]) -> None:
    (crash,) = reports["takes its own port twice"].errors
    assert (crash.code, crash.rank) == ("crash", 1)
    assert "Address already in use" in crash.cause


def test_a_crash_on_one_rank_is_a_difference(reports: Lazily[Report]) -> None:
    (crash,) = reports["fails on one rank"].errors
    assert (crash.code, crash.rank) == ("crash", 1)
    assert "only here" in crash.cause
    assert reports["fails on one rank"].coverage["communication"].startswith("not checked: the run broke off")


def test_a_hang_names_who_is_missing_and_where_both_stand(reports: Lazily[Report]) -> None:
    report = reports["waits for ever"]
    (hang,) = report.errors
    assert (hang.code, hang.rank) == ("hang", 1)
    assert "rank 0 waits in barrier" in hang.cause
    places = [remark for remark in report.remarks if "stands at" in remark]
    assert any("dist.barrier()" in place for place in places)
    assert any("time.sleep(600)" in place for place in places)


def test_parameters_that_fully_shard_cuts_are_put_together_and_compared(reports: Lazily[Report]) -> None:
    reports["cut by fully_shard"].require_same()
    assert reports["cut by fully_shard"].coverage["gradients"] == "agrees"
    assert "there is one copy" in reports["cut by fully_shard"].margins["parameters"]
    (summed,) = reports["cut by fully_shard, summed"].errors
    assert (summed.code, summed.factor) == ("gradient-scale", pytest.approx(0.5, rel=1e-3))


@pytest.mark.parametrize(
    ("name", "why"), [("cut by tensor parallelism", "whose ranks share samples"), ("cut by FSDP1", "flat pieces")]
)
def test_parameters_cut_in_another_way_are_said_not_to_be_checked(reports: Lazily[Report], name: str, why: str) -> None:
    report = reports[name]
    assert (report.verdict, report.findings) == ("inconclusive", [])
    assert why in report.coverage["gradients"]


def test_as_many_steps_are_recorded_as_were_asked_for(reports: Lazily[Report]) -> None:
    assert [reports[name].steps for name in ("cut by FSDP1", "cut by fully_shard")] == [3, 4]


def test_a_report_is_json_with_every_property(reports: Lazily[Report]) -> None:
    told = json.loads(json.dumps(reports["loss-summed"].as_json()))
    (finding,) = [one for one in told["findings"] if one["severity"] == "error"]
    assert finding["factor"] == pytest.approx(0.5, rel=1e-3)
    assert set(told["coverage"]) == {
        *("initial_state", "parameter_order", "gradients", "parameters", "buffers", "data", "random", "control"),
        *("communication", "evaluation", "checkpoint", "pipeline"),
    }
    with pytest.raises(AssertionError, match="gradient-scale"):
        reports["loss-summed"].require_same()


def test_the_readme_shows_what_the_command_says() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "readme.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_usage_errors_say_how_to_mend_them() -> None:
    for arguments, text in (
        (["-n", "1", "x.py"], "give 2 or more"),
        (["--explain", "nothing"], "there is no finding and no error"),
        (["--explain", "SteppError"], "did you mean StepError?"),
        (["--explain", "gradient-sale"], "did you mean gradient-scale?"),
        ([], "no script is given"),
        (["nowhere.py"], "there is no script"),
        (["--steps", "0", "x.py"], "give 1 or more"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "samestep", "verify", *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode, text in done.stderr) == (2, True), done.stderr
    with pytest.raises(UsageError, match="at least 2"):
        samestep.verify(__file__, ranks=1)


def test_every_kind_of_finding_has_a_page() -> None:
    sources = (ROOT / "src" / "samestep" / "verification").rglob("*.py")
    told = {code for path in sources for code in PAGES if f'code="{code}"' in path.read_text(encoding="utf-8")}
    assert told <= set(PAGES)
    assert len(told) >= 18
