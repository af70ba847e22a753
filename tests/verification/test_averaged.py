"""`samestep verify` on ranks that step by themselves: their gradients differ, and behind an average nothing does."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from lazily import Lazily

import samestep
from samestep import Report

TRAIN = """
    import samestep, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    with samestep.world(seed=1) as world:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3))
        model = samestep.replicate(net, world, average_every=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = TensorDataset(torch.randn(64, 20, generator=torch.Generator().manual_seed(1)))
        batches = samestep.shards(data, world, batch_size=8)
        for (x,) in batches:
            batches.mean(model(x).square().mean(1)).backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
        model.average()
"""
UNMINDFUL = """
    import samestep.replicas.local_sgd as local_steps
    def average(tensors, axis, original=local_steps.average):
        kept = [tensor.detach().clone() for tensor in tensors]
        original(tensors, axis)
        if axis.rank == 1:
            with torch.no_grad():
                tensors[0].copy_(kept[0])
    local_steps.average = average
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    befores = {"as declared": "", "unmindful": UNMINDFUL}

    def verified(name: str) -> Report:
        path: Path = tmp_path_factory.mktemp("script") / "train.py"
        path.write_text(textwrap.dedent(TRAIN.replace("    with ", f"{befores[name]}    with ", 1)), encoding="utf-8")
        return samestep.verify(path, ranks=2)

    return Lazily(verified)


def test_ranks_may_step_by_themselves_where_it_is_declared(reports: Lazily[Report]) -> None:
    report = reports["as declared"]
    assert report.findings == []
    why = "local steps, averaged every 3 (average_every=3); alone, the script trains on other samples than they do"
    assert report.coverage["gradients"] == f"not checked: {why}"
    assert report.coverage["parameters"] == "identical"
    assert "alike before the first step and behind every average" in report.margins["parameters"]
    assert any(remark.startswith("in float64 ranks and one process agree") for remark in report.remarks), report


def test_a_rank_that_does_not_take_an_average_over_is_named(reports: Lazily[Report]) -> None:
    (found,) = reports["unmindful"].errors
    assert (found.code, found.rank, found.tensor) == ("parameters-diverged", 1, "0.weight")
    assert found.step == 2  # behind which the first average comes


PERIODIC = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    alone = dist.new_subgroups(group_size=1)[0]
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=2), post_localSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=3, warmup_steps=2))
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
"""


@pytest.mark.prove
def test_averagers_of_torch_declare_local_steps(tmp_path: Path) -> None:
    """Ranks average gradients in two steps, then each is held against one process with its samples."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PERIODIC), encoding="utf-8")
    report = samestep.verify(path, ranks=2)
    assert (report.verdict, report.findings) == ("same", []), report
    assert report.coverage["gradients"] == "agrees as declared"
    margin = report.margins["gradients"]
    assert margin.startswith("local steps, averaged every 3 (period=3); samples of rank 0: worst error")
    assert "; samples of rank 0, rank 1: worst error" in margin
    path.write_text(
        textwrap.dedent(PERIODIC.replace("mse_loss(model(x), y)", "mse_loss(model(x), y) * dist.get_world_size()")),
        encoding="utf-8",
    )
    (found,) = samestep.verify(path, ranks=2).errors
    assert (found.code, found.factor) == ("gradient-scale", 2.0)
