import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.collectives import segments, shared_memory
from samestep.collectives.shared_memory import (
    ALIGNMENT,
    RegisteredBuffer,
    SharedMemoryAllReduce,
    addition_order,
    divide_,
    share,
)
from samestep.errors import StepError
from samestep.runtime.hosts import open_counters
from samestep.topology import tree_sum

SIZES = (0, 1, 7, 64, 1001, 40_000)


def in_order(parts, divisor=1):
    """The sum as one process computes it, from the first rank to the last; a mean of float16 is one of shares."""
    shares = [part.clone() for part in parts]
    early = shares[0].dtype == torch.float16
    for one in shares if early else ():
        divide_(one, divisor)
    total = shares[0]
    for one in shares[1:]:
        total += one
    divide_(total, 1 if early else divisor)
    return total


@given(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9))
def test_shares_cover_everything_once_and_split_no_cache_line(elements, element_bytes, ranks):
    cuts = [share(elements, element_bytes, ranks, rank) for rank in range(ranks)]
    assert [cuts[0][0], cuts[-1][1]] == [0, elements]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
    assert all(begin * element_bytes % ALIGNMENT == 0 for begin, _ in cuts if begin < elements)


@given(st.integers(1, 6), st.integers(0, 3000), st.randoms(use_true_random=False))
def test_ranks_that_add_their_shares_in_any_order_get_the_sum_in_rank_order(ranks, elements, random):
    generator = torch.Generator().manual_seed(elements)
    parts = [torch.randn(elements, generator=generator) for _ in range(ranks)]
    expected = in_order(parts, ranks)
    regions = [RegisteredBuffer(parts, rank) for rank in range(ranks)]
    random.shuffle(regions)
    for region in regions:
        region.reduce(shared_memory.REDUCE_OPS["sum"], ranks)
    assert all(torch.equal(part, expected) for part in parts)


@given(st.integers(1, 40))
def test_pairwise_neighbours_are_added_first_as_virtual_ranks_are(ranks):
    parts = [f"{rank}" for rank in range(ranks)]
    for into, other in addition_order(ranks, pairwise=True):
        parts[into] = f"({parts[into]}+{parts[other]})"
    assert parts[0] == str(tree_sum([Spelled(str(rank)) for rank in range(ranks)]))


class Spelled(str):
    __slots__ = ()

    def __add__(self, other):
        return Spelled(f"({self}+{other})")


def brought(rank, elements, dtype):
    generator = torch.Generator().manual_seed(100 * rank + elements)
    return (100 * torch.randn(elements, generator=generator)).to(dtype)


def opened():
    world = samestep.world()
    counters = open_counters(world.data)
    assert counters is not None
    return world, SharedMemoryAllReduce(counters)


def registered(dtype):
    world, memory = opened()
    with world:
        results = []
        tensors = [brought(world.rank, elements, dtype) for elements in SIZES]
        regions = [memory.register(tensor) for tensor in tensors]
        for divisor in (1, world.size):
            for tensor, region in zip(tensors, regions, strict=True):
                tensor.copy_(brought(world.rank, len(tensor), dtype))
                memory.start(region, divisor=divisor)
                memory.poll()
            memory.wait_all()
            results.append([tensor.clone() for tensor in tensors])
        memory.counters.exchange(0)
        return results, named_memory()


def named_memory():
    """What of this process's memory has a name in the memory file system, which would outlive the process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line or "/memfd:" in line}
    assert shared
    return sorted(path for path in shared if path.startswith("/dev/shm/") and not path.endswith(" (deleted)"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_registered_tensors_become_the_sum_in_rank_order_in_memory_without_a_name(three_ranks, dtype):
    for ranks, named in three_ranks(registered, dtype):
        assert named == []
        for divisor, tensors in zip((1, 3), ranks, strict=True):
            for elements, tensor in zip(SIZES, tensors, strict=True):
                assert torch.equal(tensor, in_order([brought(rank, elements, dtype) for rank in range(3)], divisor))


def large_halves():
    world, memory = opened()
    with world:
        tensor = torch.full((1000,), 60000.0, dtype=torch.float16)
        region = memory.register(tensor)
        memory.start(region, divisor=world.size)
        memory.wait_all()
        return tensor.clone()


def test_a_mean_of_halves_does_not_overflow_where_their_sum_would(two_ranks):
    for found in two_ranks(large_halves):
        assert torch.equal(found, torch.full((1000,), 60000.0, dtype=torch.float16))


def views_of_unlike_storages():
    world, memory = opened()
    with world:
        tensor = torch.zeros(3000 * (world.rank + 1))[7 * world.rank : 1000 + 7 * world.rank]
        region = memory.register(tensor)
        tensor.fill_(world.rank + 1)
        memory.start(region)
        memory.wait_all()
        return tensor.sum().item()


def test_tensors_may_lie_anywhere_in_storages_of_any_length(two_ranks):
    assert two_ranks(views_of_unlike_storages) == [3000.0, 3000.0]


def staged():
    world, memory = opened()
    with world:
        found = {}
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            for elements in (*SIZES, 700_001):
                tensor = brought(world.rank, elements, dtype)
                memory.all_reduce(tensor)
                found[str(dtype), elements] = tensor
        return found


def test_any_tensor_becomes_the_sum_in_rank_order_piece_by_piece(three_ranks):
    for found in three_ranks(staged):
        for (name, elements), tensor in found.items():
            dtype = getattr(torch, name.removeprefix("torch."))
            assert torch.equal(tensor, in_order([brought(rank, elements, dtype) for rank in range(3)])), name


def operations():
    world, memory = opened()
    with world:
        found = {}
        for op in shared_memory.REDUCE_OPS:
            tensor = torch.arange(10) + 3 * world.rank + 1
            memory.all_reduce(tensor, op)
            found[op] = tensor.tolist()
        strided = torch.arange(12.0).view(3, 4).t() * (world.rank + 1)
        memory.all_reduce(strided, divisor=2)
        return found, strided


def test_other_operations_and_other_strides(two_ranks):
    first, second = torch.arange(10) + 1, torch.arange(10) + 4
    expected = {
        "sum": first + second,
        "product": first * second,
        "min": first,
        "max": second,
        "band": first & second,
        "bor": first | second,
        "bxor": first ^ second,
    }
    for found, strided in two_ranks(operations):
        assert found == {op: tensor.tolist() for op, tensor in expected.items()}
        assert torch.equal(strided, torch.arange(12.0).view(3, 4).t() * 1.5)


def without_room():
    world, memory = opened()
    room = shared_memory._free_bytes
    if world.rank == 1:
        shared_memory._free_bytes = lambda: 100
    try:
        with world:
            return memory.register(torch.zeros(1000)) is None
    finally:
        shared_memory._free_bytes = room


def test_where_one_rank_has_no_room_none_moves_its_tensor(two_ranks):
    assert two_ranks(without_room) == [True, True]


def uneven():
    world, memory = opened()
    with world, pytest.raises(StepError, match=r"different length to one sum: \[40, 44\] bytes"):
        memory.register(torch.zeros(10 + world.rank))


def test_tensors_of_different_length_are_refused_on_all_ranks(two_ranks):
    two_ranks(uneven)


def open_descriptors():
    return sum(descriptor.exists() for descriptor in Path("/proc/self/fd").iterdir())


def test_a_failure_leaves_no_descriptor_open():
    before = open_descriptors()
    with pytest.raises((OSError, ValueError, OverflowError)):
        segments.shared_segment(-1, leader=0, leads=True, exchange=lambda place: [place])

    def gone(place):
        raise ConnectionError

    with pytest.raises(ConnectionError):
        segments.shared_segment(64, leader=0, leads=True, exchange=gone)
    assert open_descriptors() == before
