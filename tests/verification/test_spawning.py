"""Scripts that start their ranks by themselves."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import samestep
from samestep.verification.recording.spawning import for_one_rank

# the form of PyTorch's tutorial "Writing distributed applications"
SCRIPT = """
    import os, torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    def run(rank, size, epochs):
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
        sampler = DistributedSampler(dataset, size, rank)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, 8 // size, sampler=sampler):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= size
                optimizer.step()

    def start(rank, size, train, epochs):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = "29500"
        dist.init_process_group("gloo", rank=rank, world_size=size)
        train(rank, size, epochs)
        dist.destroy_process_group()

    if __name__ == "__main__":
        processes = [mp.Process(target=start, args=(rank, 2, run, 2)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]
"""
FUNCTIONS = """
import torch.distributed as dist

def train(rank, size, epochs):
    dist.init_process_group("gloo", rank=rank, world_size=size)

def work(gpu, args):
    dist.init_process_group("gloo", rank=args.node * 2 + gpu, world_size=args.world_size)
"""


def test_ranks_that_are_processes_of_multiprocessing_are_compared_with_one(tmp_path: Path) -> None:
    """Both processes of the command start both ranks, at one port; alone, the mean is over one rank, not two."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    report = samestep.verify(tmp_path / "train.py")
    report.require_same()
    assert (report.ranks, report.steps) == (2, 4)


@pytest.fixture
def functions(tmp_path: Path) -> Any:
    (tmp_path / "functions.py").write_text(FUNCTIONS, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("functions", tmp_path / "functions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_number_of_ranks_is_the_argument_that_the_group_gets(functions: Any) -> None:
    """Two epochs stay two."""
    assert for_one_rank(functions.train, (0, 2, 2), 2) == (0, 1, 2)
    assert for_one_rank(functions.train, (0, 4, 2), 2) == (0, 4, 2)  # not the ranks that were seen
    args = SimpleNamespace(world_size=2, node=0, epochs=2)
    gpu, own = for_one_rank(functions.work, (0, args), 2)
    assert (gpu, own.world_size, own.epochs, args.world_size) == (0, 1, 2, 2)


def test_arguments_of_a_function_without_source_stay(functions: Any) -> None:
    assert for_one_rank(print, (0, 2), 2) == (0, 2)
    assert for_one_rank(eval("lambda rank, size: None", vars(functions)), (0, 2), 2) == (0, 2)
