"""`samestep verify` with its options, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import samestep
from samestep.cli import main

TRAIN = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 8), torch.randn(240, 1))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_module_is_verified_on_as_many_ranks_and_steps_as_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(TRAIN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["-n", "3", "--steps", "2", "--json", "report.json", "-m", "package.train"]
    assert main(["verify", *words]) == 0, capsys.readouterr()
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (told["verdict"], told["ranks"], told["steps"], told["findings"]) == ("same", 3, 2, [])


def test_a_script_without_a_training_leaves_the_verdict_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nothing.py").write_text("print('nothing is trained here')", encoding="utf-8")
    assert main(["verify", "--verbose", str(tmp_path / "nothing.py")]) == 3
    assert "there is no training to compare" in capsys.readouterr().out


def test_a_script_is_verified_with_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nassert sys.argv[1:] == ['--lr', '0.1'], sys.argv", encoding="utf-8")
    report = samestep.verify(path, "--lr", "0.1")
    assert report.script == (str(path), "--lr", "0.1")
    assert "there is no training to compare" in str(report)
    assert "AssertionError" in str(samestep.verify(path))


LOCAL_RANK = """
import argparse, os
import torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
parser.add_argument("--lr", type=float)
options = parser.parse_args()
assert options.local_rank == int(os.environ["LOCAL_RANK"]), (options, os.environ["LOCAL_RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).chunk(2)[options.local_rank]
for x in data.split(8):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("option", ["--pass-local-rank", pytest.param("--pass-local_rank", marks=pytest.mark.prove)])
def test_each_rank_gets_its_local_rank_as_an_option(tmp_path: Path, option: str) -> None:
    (tmp_path / "train.py").write_text(LOCAL_RANK, encoding="utf-8")
    words = [option, "--json", str(tmp_path / "report.json"), str(tmp_path / "train.py"), "--lr", "0.1"]
    assert main(["verify", *words]) == 3  # each rank takes rows by its number, and one process takes others
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "get 64 different samples, those of one process 32" in told["coverage"]["data"]
