import random

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import samestep
from samestep.data.audit import audit
from samestep.data.ledger import Ledger, Skip
from samestep.data.order import SampleOrder, StepPartitioner
from samestep.errors import DataError

# Golden: two epochs of 10 samples in steps of 4, seed 0. A change is a new LEDGER_VERSION.
GOLDEN = "c1d2d35c3305ed8a65e4f190c42e3c98"


def kept(n, batch_size, epochs, *, stops=(), ranks=(1,), seed=0):
    """A ledger of a run that is saved, and goes on elsewhere, after each of the steps in `stops`."""
    ledger, step = Ledger(), 0
    for epoch in range(epochs):
        order = SampleOrder(n, seed, epoch)
        for start in range(0, n, batch_size):
            size = ranks[step % len(ranks)]
            micro = [StepPartitioner(n, batch_size, 3, rank, size).step(start).micro for rank in range(size)]
            parts = [order.take(*span) for together in zip(*micro, strict=True) for span in together]
            ledger.enter(epoch, start, np.concatenate(parts), batch_size=batch_size)
            step += 1
            if step in stops:
                ledger = Ledger.of(ledger.state())
    return ledger


def test_the_digest_never_changes():
    assert kept(10, 4, epochs=2).digest.hex() == GOLDEN


def test_the_digest_is_the_same_for_any_ranks_micro_batches_and_resumptions():
    plain = kept(100, 12, epochs=3)
    draw = random.Random(0)
    for _ in range(50):
        stops = {draw.randrange(27) for _ in range(5)}
        ranks = [draw.randint(1, 7) for _ in range(9)]
        assert kept(100, 12, epochs=3, stops=stops, ranks=ranks).digest == plain.digest


def test_another_order_another_step_or_another_epoch_is_another_digest():
    others = [kept(100, 12, 2, seed=1), kept(100, 10, 2), kept(100, 12, 3), kept(99, 12, 2)]
    assert len({ledger.digest for ledger in [kept(100, 12, 2), *others]}) == 5


def test_steps_that_follow_each_other_are_one_segment():
    state = kept(100, 7, epochs=2, stops={3}).state()
    spans = [(epoch, start, stop, batch) for epoch, start, stop, batch, _, _ in state["segments"]]
    assert spans == [(0, 0, 21, 7), (0, 21, 100, 7), (1, 0, 100, 7)]


def test_a_state_goes_on_where_it_was_taken():
    first = kept(100, 12, epochs=1)
    second = Ledger.of(first.state())
    for ledger in (first, second):
        ledger.enter(1, 0, np.arange(12), batch_size=12, skipped=(Skip(3, 3, "bad"),))
    assert first.state() == second.state()


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"digest": "xyz"}, {"begins": 3}, {"segments": ((0, 0, 4),)}, {"segments": None}],
    ids=str,
)
def test_a_malformed_state_is_refused(change):
    with pytest.raises(DataError, match="the data ledger"):
        Ledger.of(kept(10, 4, epochs=1).state() | change)


def test_the_ledger_of_many_ranks_is_that_of_one(three_ranks):
    (alone,) = {train_and_resume(1)}
    assert set(three_ranks(train_and_resume, 2)) == {alone}


def train_and_resume(micro_batch_size):
    """The digest and audit of two epochs and a bit, stopped in the middle of the first."""
    with samestep.world() as world:
        data = TensorDataset(torch.arange(50))
        options = {"batch_size": 8, "micro_batch_size": micro_batch_size, "seed": 3}
        batches = samestep.shards(data, world, **options)
        for step, _ in enumerate(batches):
            if batches.step_ends:
                batches.commit()
            if step > 10:
                break
        resumed = samestep.shards(data, world, workers=1, **options)
        resumed.load_state_dict(batches.state_dict())
        while (resumed.epoch, resumed.step) < (2, 2):
            for _ in resumed:
                if resumed.step_ends:
                    resumed.commit()
                    if (resumed.epoch, resumed.step) == (2, 2):
                        break
        state = resumed.state_dict()
        return state["ledger"]["digest"], audit(state).summary


def test_steps_that_were_never_committed_are_entered_when_the_epoch_is_over():
    with samestep.world() as world:
        batches = samestep.shards(TensorDataset(torch.arange(10)), world, batch_size=4)
        for _ in range(2):
            list(batches)
        assert batches.state_dict()["ledger"]["digest"] == GOLDEN


def test_a_state_without_a_ledger_loads_and_one_begins_there():
    with samestep.world() as world:
        batches = samestep.shards(TensorDataset(torch.arange(10)), world, batch_size=4)
        old = batches.state_dict() | {"epoch": 1, "cursor": 4}
        del old["ledger"], old["drop_last"]
        batches.load_state_dict(old)
        list(batches)
        found = audit(batches.state_dict())
        assert (found.ok, found.summary) == (
            True,
            "each sample so far exactly once; the ledger begins at epoch 1, position 4",
        )


def test_a_run_that_is_told_its_first_epoch_begins_there():
    with samestep.world() as world:
        batches = samestep.shards(TensorDataset(torch.arange(10)), world, batch_size=4)
        batches.epoch = 2
        list(batches)
        found = audit(batches.state_dict())
        assert found.summary == "every sample of 1 epoch exactly once; the ledger begins at epoch 2, position 0"
