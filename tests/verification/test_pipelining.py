"""Scripts with torch.distributed.pipelining: their steps beside those of whole batches."""

from __future__ import annotations

from pathlib import Path

import pytest

import samestep

TRAIN = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(6, 6), {norm}) for _ in range(4)]
def stages(numbers, count):
    cut = len(layers) // count
    parts = [nn.Sequential(*layers[cut * number : cut * (number + 1)]) for number in numbers]
    return [PipelineStage(part, number, count, torch.device("cpu")) for part, number in zip(parts, numbers)]
{schedule}
optimizer = torch.optim.SGD([each for one in own for each in one.submod.parameters()], lr=0.1)
generator = torch.Generator().manual_seed(1)
for step in range(4):
    x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    schedule.step(*([x] if rank == 0 else []), **(dict(target=y, losses=[]) if rank == 1 else {{}}))
    optimizer.step(); optimizer.zero_grad()
dist.destroy_process_group()
"""
STRAIGHT = "own = stages([rank], 2); schedule = Schedule1F1B(own[0], n_microbatches=4, loss_fn={loss})"
LOOPED = "own = stages([rank, rank + 2], 4); schedule = ScheduleInterleaved1F1B(own, n_microbatches=4, loss_fn={loss})"


def examined(path: Path, schedule: str, loss: str = "F.cross_entropy", norm: str = "nn.Tanh()") -> samestep.Report:
    path /= "train.py"
    path.write_text(TRAIN.format(schedule=schedule.format(loss=loss), norm=norm), encoding="utf-8")
    return samestep.verify(path)


@pytest.mark.parametrize("schedule", [STRAIGHT, LOOPED], ids=["one stage a rank", "two stages a rank"])
def test_steps_that_are_those_of_whole_batches_agree(tmp_path: Path, schedule: str) -> None:
    report = examined(tmp_path, schedule)
    assert not report.errors
    assert report.coverage["pipeline"] == report.coverage["gradients"] == "agrees"
    assert report.coverage["checkpoint"].startswith("not checked")
    assert report.verdict == "inconclusive"  # whether inputs and targets belong together is not seen


def test_means_of_means_of_padded_micro_batches_are_found(tmp_path: Path) -> None:
    report = examined(tmp_path, STRAIGHT, loss="lambda o, y: F.cross_entropy(o, y, ignore_index=0)")
    (finding,) = report.errors
    assert (finding.code, finding.step) == ("pipeline-inexact", 0)
    assert finding.where is not None
    assert finding.where.rpartition("/")[2].startswith("train.py:19")
    assert "4 micro-batches of 2 stages are not that batch" in finding.cause


def test_batch_norm_leaves_it_open(tmp_path: Path) -> None:
    report = examined(tmp_path, STRAIGHT, norm="nn.BatchNorm1d(6)")
    assert not report.errors
    assert "BatchNorm, whose statistics are those of micro-batches" in report.coverage["pipeline"]
