"""Messages between two ranks of one host arrive as they were sent, in order, and no sender waits."""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import PeerError, StepError
from samestep.pipelines import shm_channel as module
from samestep.pipelines.pipeline import Pipeline
from samestep.pipelines.shm_channel import MIN_BUFFER, SLOTS, SharedMemoryChannel, open_shm_channels
from samestep.pipelines.tensor_meta import TensorMeta

DESCRIPTORS = Path("/proc/self/fd")


def pair(timeout_s=10.0):
    """Both ends, in this process."""
    memory = mmap.mmap(-1, SharedMemoryChannel.size())
    ends = [SharedMemoryChannel(memory, place, (4, 7), [os.getpid()] * 2, timeout_s) for place in (0, 1)]
    for end in ends:
        end.begin_step(1 << 30, 1 << 30)
    return ends


def received(channel, *like):
    metas = [TensorMeta(each.dtype, tuple(each.shape), torch.empty(each.shape).stride()) for each in like]
    return channel.receive(tuple(metas))[1]


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_tensors_of_a_message_arrive_whatever_their_type_and_length(dtype):
    mine, theirs = pair()
    sent = [numbers(*shape, dtype=dtype) for shape in ((3, 5), (), (0, 4), (1,), (129, 7))]
    mine.send(sent)
    for found, wanted in zip(received(theirs, *sent), sent, strict=True):
        assert torch.equal(found, wanted)


def test_what_was_laid_down_is_a_copy_and_so_is_what_was_received():
    mine, theirs = pair()
    tensor = torch.ones(4)
    mine.send([tensor])
    tensor.zero_()
    (first,) = received(theirs, tensor)
    mine.send([tensor])  # in the same place
    (second,) = received(theirs, tensor)
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [0.0] * 4


def test_a_turned_tensor_is_laid_down_in_the_order_of_its_dims():
    mine, theirs = pair()
    turned = numbers(6, 4).t()
    mine.send([turned])
    assert torch.equal(received(theirs, turned)[0], turned)


def test_both_ranks_lay_messages_down_at_once():
    mine, theirs = pair()
    for number in range(5):
        mine.send([torch.tensor(number)])
        theirs.send([torch.tensor(-number)])
    assert [int(received(theirs, torch.tensor(0))[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [int(received(mine, torch.tensor(0))[0]) for _ in range(5)] == [0, -1, -2, -3, -4]


def test_what_does_not_fit_goes_to_more_memory_and_nothing_waits():
    mine, theirs = pair(timeout_s=0.0)
    sent = [numbers(MIN_BUFFER // 8 + number, seed=number) for number in range(40)]
    for each in sent:
        mine.send([each])
    for each in sent:
        assert torch.equal(received(theirs, each)[0], each)


def test_memory_is_used_again_when_all_has_been_received():
    mine, theirs = pair()
    tensor = numbers(MIN_BUFFER // 8)
    before, open_ones = set(DESCRIPTORS.iterdir()), []
    for _ in range(12):
        for _ in range(6):
            mine.send([tensor])
        for _ in range(6):
            assert torch.equal(received(theirs, tensor)[0], tensor)
        open_ones.append(len(set(DESCRIPTORS.iterdir()) - before))
    assert open_ones[2:] == [3] * 10  # of one memory: its own, and one of each mapping
    mine.send([tensor])
    mine.close()
    assert torch.equal(received(theirs, tensor)[0], tensor)


def test_a_step_ends_when_the_other_rank_has_opened_new_memory():
    """The memory is gone with the rank that made it, and what was laid down last would be lost."""
    mine, theirs = pair(timeout_s=0.1)
    assert mine.is_drained
    mine.end_step()
    mine.send([torch.ones(3)])
    mine.send([numbers(MIN_BUFFER)])
    received(theirs, torch.ones(3))
    assert not mine.is_drained
    with pytest.raises(PeerError, match="rank 4 waited 0 s"):
        mine.end_step()
    assert torch.equal(received(theirs, numbers(MIN_BUFFER))[0], numbers(MIN_BUFFER))
    mine.end_step()
    assert mine.is_drained


def test_a_shelf_that_is_forgotten_leaves_no_descriptor():
    before = set(DESCRIPTORS.iterdir())
    mine, theirs = pair()
    mine.send([torch.ones(3)])
    received(theirs, torch.ones(3))
    del mine, theirs
    assert set(DESCRIPTORS.iterdir()) == before


def test_more_messages_than_the_ledger_has_lines_wait_for_the_one_who_takes():
    mine, theirs = pair()
    number = torch.zeros((), dtype=torch.int64)
    begun = threading.Event()

    def send():
        for each in range(3 * SLOTS):
            if each == SLOTS:
                begun.set()
            mine.send([torch.tensor(each)])

    with ThreadPoolExecutor() as pool:
        laying = pool.submit(send)
        assert begun.wait(30)
        found = [int(received(theirs, number)[0]) for _ in range(3 * SLOTS)]
        laying.result(30)
    assert found == list(range(3 * SLOTS))


def test_nobody_who_takes_is_waited_for_longer_than_the_limit():
    mine, _ = pair(timeout_s=0.2)
    with pytest.raises(PeerError, match=r"rank 4 waited 0 s to exchange activations and gradients with rank 7 \("):
        [mine.send([]) for _ in range(SLOTS + 1)]


def test_who_gave_up_a_step_does_not_leave_the_other_waiting():
    mine, theirs = ends = pair()
    for end in ends:
        end._step_end = 0, 0
        end.begin_step(3, 3)
    mine.send([torch.tensor(1)])
    received(theirs, torch.tensor(0))
    mine.begin_step(3, 3)  # before it lays anything down: it may wait for the other one first
    with pytest.raises(StepError, match="rank 4 aborted a pipeline step and started the next one"):
        theirs.receive(())
    theirs.begin_step(3, 3)  # and so may this one
    mine.send([torch.tensor(2)])
    assert int(received(theirs, torch.tensor(0))[0]) == 2


def test_what_a_step_has_left_that_both_gave_up_is_skipped():
    mine, theirs = ends = pair()
    for end in ends:
        end._step_end = 0, 0
        end.begin_step(3, 3)
    for value in (1, 2):
        mine.send([torch.tensor(value)])
    for end in ends:
        end.begin_step(3, 3)
    mine.send([torch.tensor(3)])
    assert int(received(theirs, torch.tensor(0))[0]) == 3


def test_who_left_is_named():
    mine, theirs = pair()
    mine.close()
    with pytest.raises(PeerError, match=r"rank 4 \(process \d+\) has left, and rank 7 waited to exchange activations"):
        theirs.receive(())


# --- between ranks ---------------------------------------------------------------------------


def found():
    with samestep.world(pipeline=int(os.environ["WORLD_SIZE"])) as world:
        ends = open_shm_channels(world.pipeline, world.device)
        for end in ends.values():
            end.begin_step(1, 1)
            end.send([torch.tensor(world.rank)])
        told = {other: int(received(end, torch.tensor(0))[0]) for other, end in ends.items()}
        world.barrier()
        return told, open_shm_channels(world.pipeline, torch.device("meta"))


def test_ranks_share_memory_with_those_before_and_behind_them(two_ranks, four_ranks):
    assert two_ranks(found) == [({1: 1}, {}), ({0: 0}, {})]
    assert [told for told, _ in four_ranks(found)] == [{1: 1, 3: 3}, {0: 0, 2: 2}, {1: 1, 3: 3}, {0: 0, 2: 2}]


class Fails(nn.Linear):
    """A layer that fails at its sixth call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 6:
            raise ValueError("a bad sample")
        return super().forward(x)


def skipping():
    """What each rank is told where rank 0 leaves out a step that fails."""
    with samestep.world(pipeline=2, timeout=20) as world:
        stage = Pipeline(nn.Sequential(Fails(8, 8), nn.Linear(8, 8)), world, nn.functional.mse_loss, ends=[1, 2])
        for _ in range(4):
            try:
                stage.step((torch.ones(8, 8), torch.zeros(8, 8)))
            except ValueError:
                assert world.is_first
            except (StepError, PeerError) as error:
                return str(error)
        return "all steps were taken"


def test_a_rank_that_skips_a_step_is_named_by_the_one_that_waits(two_ranks):
    skipped, waited = two_ranks(skipping)
    assert "rank 1" in skipped
    assert waited.startswith("rank 0 aborted a pipeline step and started the next one before it had sent what")


def trained(blind):
    """Gradients after a step; on rank 1 no memory of others can be opened, if `blind`."""
    torch.manual_seed(0)
    opened = module.open_segment
    if blind and os.environ["RANK"] == "1":
        module.open_segment = lambda *_: None
    try:
        with samestep.world(pipeline=2) as world:
            model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
            stage = Pipeline(model, world, nn.functional.mse_loss, ends=[1, 3], micro_batches=3)
            x, y = numbers(9, 5), numbers(9, 3, seed=1)
            loss = stage.step((x, y))
            own = {name: each.grad for name, each in stage.named_parameters()}
            return (
                sum(isinstance(each, SharedMemoryChannel) for each in stage._channels.values()),
                loss,
                stage.gathered(own),
            )
    finally:
        module.open_segment = opened


def test_ranks_that_cannot_see_each_others_memory_train_alike_without(two_ranks):
    (with_memory, loss, gradients), *_ = two_ranks(trained, False)
    (without, other_loss, other_gradients), (no_more, *_) = two_ranks(trained, True)
    assert (with_memory, without, no_more) == (1, 0, 0)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
