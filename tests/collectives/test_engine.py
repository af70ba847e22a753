"""One rank's part: what it posts, when it adds, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from wire import Wire

from samestep.collectives import doubling, engine, ring, segmented
from samestep.collectives.engine import ScratchBuffers
from samestep.collectives.plan import Plan, Transfer
from samestep.errors import DeviceError, UsageError


class Recorder:
    """A transport to nobody, which notes what is asked of it; whatever is received is all ones."""

    def __init__(self, rank, size, buffer):
        self.rank, self.size = rank, size
        self.buffer = buffer
        self.events = []

    def isend(self, tensor, target, tag):
        self.events.append(("send", target, tag, tensor.tolist()))
        return Done(self, "sent", tensor)

    def irecv(self, tensor, source, tag):
        self.events.append(("receive", source, tag))
        return Done(self, "received", tensor)


class Done:
    def __init__(self, recorder, word, tensor):
        self.recorder, self.word, self.tensor = recorder, word, tensor

    def wait(self):
        self.recorder.events.append((self.word, self.recorder.buffer.tolist()))
        if self.word == "received":
            self.tensor.fill_(1)


def record(plan, rank, elements):
    buffer = torch.zeros(elements)
    recorder = Recorder(rank, plan.ranks, buffer)
    engine.run(plan, buffer, recorder)
    return recorder.events, buffer.tolist()


def test_every_receive_is_posted_before_every_send_and_both_before_any_wait():
    events, _ = record(doubling.all_reduce(4), 0, 1)
    assert [event[0] for event in events] == ["receive", "send", "received", "sent"] * 2


def test_what_must_be_sent_on_is_added_first():
    events, end = record(ring.all_reduce(3), 0, 3)
    sent = [event[3] for event in events if event[0] == "send"]
    # block 2 as it was, block 1 with what came, block 0 finished, then what rank 2 finished, passed on
    assert sent == [[0], [1], [1], [1]]
    assert end == [1, 1, 1]


def test_what_nobody_waits_for_is_added_while_the_next_round_travels():
    plan = segmented.reduce_scatter(2, 2)
    events, end = record(plan, 0, 4)
    arrived = [event[1] for event in events if event[0] == "received"]
    assert arrived == [[0, 0, 0, 0], [1, 0, 0, 0]]  # the first is in place before the second has come
    assert end == [1, 1, 0, 0]


def test_blocks_without_elements_are_not_sent():
    events, _ = record(ring.all_reduce(4), 1, 1)  # one element is in block 0, the others are empty
    moved = [event[:3] for event in events if event[0] in {"send", "receive"}]
    # block 0 begins its way here, to rank 2, and comes back finished from rank 0, to be passed on
    assert moved == [("send", 2, 0), ("receive", 0, 0), ("send", 2, 0)]


def test_a_buffer_without_elements_sends_nothing():
    assert record(ring.all_reduce(4), 0, 0) == ([], [])


def test_two_transfers_between_the_same_ranks_in_one_round_are_told_apart():
    plan = Plan.from_transfers(
        "two", "broadcast", 2, 4, ((Transfer(0, 1, 0, 1), Transfer(0, 1, 2, 4), Transfer(0, 1, 1, 2)),)
    )
    tags = [event[2] for event in record(plan, 1, 4)[0] if event[0] == "receive"]
    assert sorted(tags) == [0, 1, 2]


def test_scratch_memory_is_used_again_and_grows():
    scratch, like = ScratchBuffers(), torch.ones(1)
    small = scratch.take(like, 10, turn=0)
    assert scratch.take(like, 5, turn=0).data_ptr() == small.data_ptr()
    assert scratch.take(like, 10, turn=1).data_ptr() != small.data_ptr()
    assert scratch.take(like, 20, turn=0).numel() == 20
    assert scratch.take(torch.ones(1, dtype=torch.int64), 5, turn=0).dtype == torch.int64


def test_a_second_run_needs_no_memory_of_its_own():
    scratch, wire = ScratchBuffers(), Wire()
    plan = doubling.all_reduce(1)
    engine.run(plan, torch.ones(4), wire.end(0, 1), scratch)
    events = []
    for _ in range(2):
        recorder = Recorder(0, 2, torch.zeros(2))
        engine.run(doubling.all_reduce(2), recorder.buffer, recorder, scratch)
        events.append(recorder.buffer.tolist())
    assert events == [[1, 1], [1, 1]]


def test_a_leaf_that_requires_gradients_is_reduced_like_any_other():
    weights = torch.zeros(2, requires_grad=True)
    engine.run(doubling.all_reduce(2), weights, Recorder(0, 2, weights.detach()))
    assert weights.tolist() == [1, 1]


@pytest.mark.parametrize(
    "buffer", [torch.ones(2, 3), torch.ones(6)[::2], torch.tensor(1.0)], ids=["2-d", "holes", "0-d"]
)
def test_a_buffer_that_is_not_flat_is_refused(buffer):
    with pytest.raises(UsageError, match=r"not flat: pass contiguous memory in one dim, such as tensor"):
        engine.run(ring.all_reduce(2), buffer, Recorder(0, 2, buffer))


def test_a_buffer_that_is_not_in_host_memory_is_refused():
    buffer = torch.ones(1, device="meta")
    with pytest.raises(DeviceError, match="this tensor is on meta: copy it to the CPU"):
        engine.run(ring.all_reduce(2), buffer, Recorder(0, 2, buffer))


def test_a_plan_for_another_number_of_ranks_is_refused():
    with pytest.raises(UsageError, match="ring is a plan over 3 ranks, and here are 2: plan for those"):
        engine.run(ring.all_reduce(3), torch.ones(2), Recorder(0, 2, torch.ones(2)))
