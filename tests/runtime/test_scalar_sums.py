import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.errors import PeerError, StepError
from samestep.runtime.scalar_sums import SharedScalars, StepTag, shared_bytes

ABOUT = StepTag("report", 1, 2, 3)


def scalars(ranks, timeout_s=5.0):
    """The sums of several ranks, all in this process."""
    memory = mmap.mmap(-1, shared_bytes(ranks))
    return [SharedScalars(memory, rank, range(ranks), [os.getpid()] * ranks, timeout_s) for rank in range(ranks)]


def test_numbers_are_added_in_rank_order():
    ours = scalars(3)
    for step in range(5):
        sums = [one.send(0.1 * (rank + step), rank, tag=ABOUT) for rank, one in enumerate(ours)]
        expected = (0.0 + 0.1 * step + 0.1 * (1 + step) + 0.1 * (2 + step), 3.0)
        assert [one.wait() for one in sums] == [expected] * 3


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200))
def test_no_number_is_overwritten_before_it_is_read_whoever_is_ahead(turns):
    """A rank whose turn it is sends if it can without waiting, and so runs ahead as far as it ever may."""
    ours = scalars(3, timeout_s=0.0)
    sent = [[], [], []]
    for rank in turns:
        if min(map(len, sent)) >= ours[rank]._number:
            sent[rank].append(ours[rank].send(float(len(sent[rank])), float(rank), tag=ABOUT))
    complete = min(map(len, sent))
    for sums in sent:
        for number, one in enumerate(sums[:complete]):
            assert one.wait() == (3.0 * number, 3.0)


def test_untouched_memory_and_half_written_slots_are_not_read():
    first, second = scalars(2)
    assert first._read(1, 0) is None
    second.send(1.0, 2.0, tag=ABOUT)
    assert first._read(1, 1) == (1.0, 2.0, ABOUT)
    place = first._slot(1, 1)
    for offset in range(57):
        kept = first.memory[place + offset]
        first.memory[place + offset] = kept ^ 0x10
        assert first._read(1, 1) is None, f"byte {offset}"
        first.memory[place + offset] = kept


def test_a_rank_that_never_writes_is_named_with_the_wait():
    first, _ = scalars(2, timeout_s=0.2)
    pending = first.send(1.0, tag=ABOUT)
    with pytest.raises(PeerError, match=r"rank 0 waited 0 s for rank 1 \(process \d+\) to end this step"):
        pending.wait()


def test_a_rank_that_is_gone_is_named_long_before_the_timeout():
    child = os.fork()
    if child == 0:
        os._exit(0)
    memory = mmap.mmap(-1, shared_bytes(2))
    pending = SharedScalars(memory, 0, [0, 1], [os.getpid(), child], 3600.0).send(1.0, tag=ABOUT)
    with pytest.raises(PeerError, match=rf"rank 1 \(process {child}\) has left"):
        pending.wait()  # dead, and nobody has waited for it yet
    os.waitpid(child, 0)
    with pytest.raises(PeerError, match=rf"rank 1 \(process {child}\) has left"):
        pending.wait()


def test_a_rank_that_has_left_the_world_is_named_while_its_process_lives_on():
    first, second = scalars(2, timeout_s=3600.0)
    second.leave()
    with pytest.raises(PeerError, match="has left and never ended this step"):
        first.send(1.0, tag=ABOUT).wait()


def test_ranks_that_went_different_ways_are_told_so():
    first, second = scalars(2)
    pending = first.send(1.0, tag=ABOUT)
    second.send(1.0, tag=StepTag("weight", 1, 2, 3))
    with pytest.raises(StepError, match="rank 0 sent the report of shards 1, epoch 2, position 3, rank 1 the weight"):
        pending.wait()


@given(
    st.sampled_from(["report", "weight", "batch"]),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**62),
    st.integers(0, 2**64 - 1),
)
def test_a_tag_arrives_whole(purpose, loader, epoch, position, settings):
    tag = StepTag(purpose, loader, epoch, position, settings)
    first, second = scalars(2)
    second.send(1.0, tag=tag)
    assert first._read(1, 1) == (1.0, 0.0, tag)


def both_ways():
    with samestep.world() as world:
        axis = world.data
        assert axis.scalars is not None
        in_memory = [axis.start_sum(world.rank + step / 3, 1.0, tag=ABOUT).wait() for step in range(4)]
        axis.scalars = None
        by_gloo = [axis.start_sum(world.rank + step / 3, 1.0, tag=ABOUT) for step in range(4)]
        return in_memory, [one.wait() for one in by_gloo]


def test_shared_memory_and_gloo_say_the_same(three_ranks):
    for in_memory, by_gloo in three_ranks(both_ways):
        for mine, other in zip(in_memory, by_gloo, strict=True):
            assert mine == pytest.approx(other, rel=1e-15)


def test_nothing_is_left_in_the_memory_file_system(two_ranks):
    before = set(Path("/dev/shm").iterdir())
    two_ranks(both_ways)
    assert set(Path("/dev/shm").iterdir()) <= before


def test_ranks_are_called_by_the_names_that_they_have_in_the_world():
    memory = mmap.mmap(-1, shared_bytes(2))
    first, second = (SharedScalars(memory, rank, [1, 3], [os.getpid()] * 2, 0.2) for rank in range(2))
    pending = first.send(1.0, tag=ABOUT)
    with pytest.raises(PeerError, match=r"rank 1 waited 0 s for rank 3 \(process"):
        pending.wait()
    second.send(1.0, tag=StepTag("weight", 1, 2, 3))
    with pytest.raises(StepError, match="rank 1 sent the report .*, rank 3 the weight"):
        pending.wait()
