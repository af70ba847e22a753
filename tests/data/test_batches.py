from collections import UserDict, defaultdict
from typing import NamedTuple

import pytest
import torch

from samestep.data.batches import DevicePrefetcher, empty_like, tensors_of, to_device
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


def test_an_empty_batch_of_its_own_keeps_no_memory_alive():
    batch = torch.ones(3, 2)
    assert empty_like(batch).untyped_storage().nbytes() == 24
    assert empty_like(batch, own=True).untyped_storage().nbytes() == 0


def test_every_tensor_of_a_batch_is_found_and_moved():
    batch = [torch.ones(1), {"a": (torch.zeros(2), "text")}, None]
    assert [len(tensor) for tensor in tensors_of(batch)] == [1, 2]
    assert [tensor.device.type for tensor in tensors_of(to_device(batch, torch.device("meta")))] == ["meta", "meta"]


def test_a_mapping_keeps_its_type():
    batch = empty_like(UserDict({"x": torch.ones(3, 2)}))
    assert isinstance(batch, UserDict)
    assert batch["x"].shape == (0, 2)


class Labels(dict):
    """A dict with attributes, as libraries have them."""


def test_a_dict_of_a_kind_keeps_its_kind():
    batch = to_device(Labels(x=torch.ones(3, 2)), torch.device("cpu"))
    assert type(batch) is Labels
    assert type(to_device(defaultdict(list, x=torch.ones(1)), torch.device("cpu"))) is dict  # it cannot be made of one


class About(NamedTuple):
    name: str
    step: int


def test_a_named_tuple_without_tensors_stays_as_it_is():
    assert empty_like([torch.ones(3), About("train", 7)])[1] == About("train", 7)


def test_on_the_cpu_batches_pass_through_in_order():
    mover = DevicePrefetcher(torch.device("cpu"))
    batches = [torch.tensor(n) for n in range(3)]
    assert [int(batch) for batch in mover.stream_through(iter(batches))] == [0, 1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: copies on a stream of their own")
def test_on_a_gpu_batches_arrive_whole_and_in_order():
    mover = DevicePrefetcher(torch.device("cuda", 0))
    batches = [torch.full((1 << 20,), float(n)).pin_memory() for n in range(4)]
    assert [batch.sum().item() / (1 << 20) for batch in mover.stream_through(iter(batches))] == [0, 1, 2, 3]
