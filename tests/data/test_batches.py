import subprocess
import sys
import threading
from collections import UserDict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import Dataset

import samestep
from samestep.data.batches import Mover, empty_like, moved, tensors_of
from samestep.errors import DataError
from samestep.testing import assert_same_bits


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_an_empty_batch_keeps_structure_dims_and_dtypes():
    batch = {
        "pair": Pair(torch.ones(3, 2), torch.arange(3)),
        "names": ["a", "b", "c"],
        "step": 7,
        "scale": torch.ones(()),
    }
    empty = empty_like(batch)
    assert_same_bits(empty["pair"].x, torch.ones(0, 2))
    assert_same_bits(empty["pair"].y, torch.arange(0))
    assert isinstance(empty["pair"], Pair)
    assert (empty["names"], empty["step"]) == ([], 7)
    assert_same_bits(empty["scale"], torch.ones(()))


def test_every_tensor_of_a_batch_is_found_and_moved():
    batch = [torch.ones(1), {"a": (torch.zeros(2), "text")}, None]
    assert [len(tensor) for tensor in tensors_of(batch)] == [1, 2]
    assert [tensor.device.type for tensor in tensors_of(moved(batch, torch.device("meta")))] == ["meta", "meta"]


def test_a_mapping_keeps_its_type():
    batch = empty_like(UserDict({"x": torch.ones(3, 2)}))
    assert isinstance(batch, UserDict)
    assert batch["x"].shape == (0, 2)


def test_on_the_cpu_batches_pass_through_in_order():
    mover = Mover(torch.device("cpu"))
    batches = [torch.tensor(n) for n in range(3)]
    assert [int(batch) for batch in mover.stream_through(iter(batches))] == [0, 1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: copies on a stream of their own")
def test_on_a_gpu_batches_arrive_whole_and_in_order():
    mover = Mover(torch.device("cuda", 0))
    batches = [torch.full((1 << 20,), float(n)).pin_memory() for n in range(4)]
    assert [batch.sum().item() / (1 << 20) for batch in mover.stream_through(iter(batches))] == [0, 1, 2, 3]


class WithBadSample(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise DataError("sample 2 cannot be read: bad.jpg")
        return torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_is_one_line_from_a_worker_too(workers):
    with samestep.world() as world:
        batches = samestep.shards(WithBadSample(), world, batch_size=4, workers=workers)
        with pytest.raises(DataError) as caught:
            list(batches)
    assert str(caught.value) == "sample 2 cannot be read: bad.jpg"


class WithStuckSample:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 40:
            threading.Event().wait()
        return torch.tensor(index)


def leave_in_mid_epoch(dataset):
    """A script that ends while its workers still load; run as a process of its own."""
    world = samestep.world()
    batches = iter(samestep.shards(dataset, world, batch_size=4, workers=2, shuffle=False))
    leave_in_mid_epoch.kept = batches  # as a name at the top of a script would
    print(next(batches).tolist())


@pytest.mark.parametrize("dataset", ["range(64)", "WithStuckSample()"])
def test_a_script_that_ends_in_mid_epoch_ends_with_its_workers(dataset):
    code = f"from {__name__} import *; leave_in_mid_epoch({dataset})"
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2, 3]\n", "")
