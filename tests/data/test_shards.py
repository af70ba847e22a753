import math

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import samestep
from samestep.data.audit import audit
from samestep.data.order import SampleOrder
from samestep.errors import DataError, PeerError, StepError


def numbers(n):
    return TensorDataset(torch.arange(n))


def seen(n, batch_size, options, epochs=1):
    """Which samples each micro-batch of this rank held, and whether it ended its step."""
    with samestep.world() as world:
        batches = samestep.shards(numbers(n), world, batch_size=batch_size, **options)
        return [(x.tolist(), batches.step_ends) for _ in range(epochs) for (x,) in batches]


def test_ranks_take_slices_of_the_one_order(three_ranks):
    order = SampleOrder(10, seed=0).take(0, 10).tolist()
    assert three_ranks(seen, 10, 4, {}) == [
        [(order[0:2], True), (order[4:6], True), (order[8:9], True)],
        [(order[2:3], True), (order[6:7], True), (order[9:10], True)],
        [(order[3:4], True), (order[7:8], True), ([], True)],
    ]


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, {"workers": 2}, {"weight": len}])
def test_options_change_neither_order_nor_multiset(two_ranks, options):
    first, second = two_ranks(seen, 23, 8, {"seed": 4, **options})
    together = [sample for (mine, _), (other, _) in zip(first, second, strict=True) for sample in mine + other]
    assert together == SampleOrder(23, seed=4).take(0, 23).tolist()


def test_step_ends_is_known_before_forward():
    flags = [ends for _, ends in seen(10, 6, {"micro_batch_size": 2})]
    assert flags == [False, False, True, False, True]


def test_the_length_counts_micro_batches():
    with samestep.world() as world:
        batches = samestep.shards(numbers(10), world, batch_size=6, micro_batch_size=2)
        assert len(batches) == 5
        assert batches.steps_per_epoch == 2


def test_the_shuffle_changes_from_epoch_to_epoch_by_itself():
    samples = [x for part, _ in seen(10, 10, {}, epochs=2) for x in part]
    assert samples == SampleOrder(10, 0, 0).take(0, 10).tolist() + SampleOrder(10, 0, 1).take(0, 10).tolist()


def test_the_epoch_advances_when_exhausted_not_when_peeked_at():
    with samestep.world() as world:
        batches = samestep.shards(numbers(6), world, batch_size=2)
        (first,) = next(iter(batches))
        assert batches.epoch == 0
        assert next(iter(batches))[0].tolist() == first.tolist()
        assert len(list(batches)) == 3
        assert batches.epoch == 1


def test_committed_steps_are_behind_uncommitted_ones_come_again():
    with samestep.world() as world:
        batches = samestep.shards(numbers(8), world, batch_size=2, shuffle=False)
        taken = iter(batches)
        next(taken)
        batches.commit()
        next(taken)
        assert [x.tolist() for (x,) in batches] == [[2, 3], [4, 5], [6, 7]]


def test_a_resume_goes_on_behind_the_last_committed_step(two_ranks):
    for rank, (before, after) in enumerate(two_ranks(resume_in_mid_epoch)):
        order = SampleOrder(10, seed=0).take(0, 10).tolist()
        assert before == order[2 * rank : 2 * rank + 2]
        assert after == [order[4 + 2 * rank : 6 + 2 * rank], order[8 + rank : 9 + rank]]


def resume_in_mid_epoch():
    with samestep.world() as world:
        batches = samestep.shards(numbers(10), world, batch_size=4)
        for (x,) in batches:
            before = x.tolist()
            batches.commit()
            break
        state = batches.state_dict()
        resumed = samestep.shards(numbers(10), world, batch_size=4)
        resumed.load_state_dict(state)
        return before, [x.tolist() for (x,) in resumed]


def test_what_workers_have_prefetched_is_not_consumed():
    with samestep.world() as world:
        data = CountsWhatItLoads(64)
        batches = samestep.shards(data, world, batch_size=4, workers=2)
        loop = iter(batches)
        for _ in range(2):
            next(loop)
            batches.commit()
        next(loop)
        while data.loaded.sum() < 24:  # two ahead for each worker, whatever the steps do
            data.loaded.numpy()
        state = batches.state_dict()
        loop.close()
        resumed = samestep.shards(data, world, batch_size=4, workers=1)
        resumed.load_state_dict(state)
        rest = [x for batch in resumed for x in batch.tolist()]
        assert state["cursor"] == 8
        assert rest == SampleOrder(64, seed=0).take(8, 64).tolist()
        assert audit(resumed.state_dict()).summary == "every sample of 1 epoch exactly once"


class CountsWhatItLoads(Dataset):
    def __init__(self, size):
        self.loaded = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.loaded)

    def __getitem__(self, index):
        self.loaded[index] += 1
        return torch.tensor(index)


def test_a_state_of_other_data_is_refused():
    with samestep.world() as world:
        state = samestep.shards(numbers(10), world, batch_size=4).state_dict()
        with pytest.raises(DataError, match="samples 10, this one has 12"):
            samestep.shards(numbers(12), world, batch_size=4).load_state_dict(state)
        with pytest.raises(DataError, match="seed 0, this one has 1"):
            samestep.shards(numbers(10), world, batch_size=4, seed=1).load_state_dict(state)
        own = {"own": [1, 0, 4, 1], "epoch": 0, "cursor": 4, "steps": 1}
        with pytest.raises(DataError, match="the saved run had order of its own, this one has 1"):
            samestep.shards(numbers(10), world, batch_size=4).load_state_dict(own)


def test_losses_of_all_ranks_add_up_to_the_steps_loss(three_ranks):
    results = three_ranks(mean_of_everything)
    assert sum(local for local, _, _ in results) == pytest.approx(4.5, abs=1e-15)
    assert {total for _, total, _ in results} == {4.5}  # and reading it left the local values alone
    # rank 2 has no sample in this step of 2: its zero backpropagates, and DDP's division by 3 is made up for
    assert [gradient for _, _, gradient in results] == pytest.approx([3 * 4 / 2, 3 * 5 / 2, 0.0])


def mean_of_everything():
    with samestep.world() as world:
        data = TensorDataset(torch.tensor([4.0, 5.0, 0.0], dtype=torch.float64))
        batches = samestep.shards(data, world, batch_size=3, shuffle=False)
        batches._partitioner = type(batches._partitioner)(2, 3, None, world.rank, 3)
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        for (x,) in batches:
            loss = batches.mean(x * factor)
            loss.backward()
        return loss.item(), batches.loss, factor.grad.item()


def test_a_mask_of_nothing_gives_a_zero_not_a_nan():
    with samestep.world() as world:
        batches = samestep.shards(numbers(2), world, batch_size=2, weight=lambda batch: 0)
        for (x,) in batches:
            assert batches.mean(x.double(), torch.zeros(2)).item() == 0.0


def test_reading_the_loss_is_not_collective(two_ranks):
    first, second = two_ranks(read_on_one_rank)
    assert math.isnan(first[0])
    assert first[1] == second[1] == 0.5


def read_on_one_rank():
    with samestep.world() as world:
        batches = samestep.shards(numbers(2), world, batch_size=2)
        before = batches.loss
        if world.rank == 0:
            assert math.isnan(batches.loss)
        for (x,) in batches:
            batches.mean(x.double())
        return before, batches.loss


def test_a_request_of_one_rank_is_agreed_by_all_at_the_same_step(two_ranks):
    assert two_ranks(request_a_save) == [[(), (), ("save",)]] * 2


def request_a_save():
    with samestep.world() as world:
        batches = samestep.shards(numbers(6), world, batch_size=2)
        world.step.enable_requests()
        agreed = []
        for step, _ in enumerate(batches):
            if step == 1 and world.rank == 1:
                world.step.request("save")
            batches.finish_step()
            agreed.append(tuple(world.step.agreed))
        return agreed


def test_an_empty_batch_keeps_every_other_dim(two_ranks):
    assert two_ranks(shapes_of_nothing)[1] == [([0, 3, 2], torch.float64), ([0], torch.int64)]


def shapes_of_nothing():
    with samestep.world() as world:
        data = TensorDataset(torch.ones(3, 3, 2, dtype=torch.float64), torch.arange(3))
        *_, (x, y) = samestep.shards(data, world, batch_size=2)
        return [(list(x.shape), x.dtype), (list(y.shape), y.dtype)]


class WithoutLength(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (numbers(0), {}, "TensorDataset is empty"),
        (WithoutLength(), {}, "WithoutLength has no length"),
        (DataLoader(numbers(4)), {}, "takes the dataset, not a DataLoader"),
        (numbers(4), {"batch_size": 0}, "^batch_size 0 is too few: give 1 or more$"),
        (numbers(4), {"batch_size": "2"}, "^batch_size '2' is no whole number: give 1 or more$"),
        (numbers(4), {"batch_size": 2.0}, "batch_size 2.0 is no whole number"),
        (numbers(4), {"micro_batch_size": 0}, "^micro_batch_size 0 is too few"),
        (numbers(4), {"micro_batch_size": True}, "micro_batch_size True is no whole number"),
        (numbers(4), {"workers": -1}, "^workers -1 is too few: give 0 or more$"),
        (numbers(1), {"drop_last": True}, "drop_last leaves nothing"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(dataset, options, message):
    with samestep.world() as world, pytest.raises(DataError, match=message) as caught:
        samestep.shards(dataset, world, **{"batch_size": 2, **options})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_batch_smaller_than_the_world_is_refused(three_ranks):
    (message,) = set(three_ranks(batch_of_two))
    assert message.startswith("batch_size 2 is smaller than the 3 ranks that share it")


def batch_of_two():
    with samestep.world() as world:
        try:
            samestep.shards(numbers(9), world, batch_size=2)
        except DataError as error:
            return str(error)


@pytest.mark.parametrize("losses", [torch.tensor(1.0), torch.ones(4)], ids=["reduced", "mask counts another number"])
def test_weighted_losses_that_do_not_fit_their_weight_are_refused(losses):
    with samestep.world() as world:
        batches = samestep.shards(numbers(4), world, batch_size=4, weight=lambda batch: 3)
        next(taken := iter(batches))
        with pytest.raises(StepError, match="reduced already|lets 4 losses count, but weight\\(\\) said 3"):
            batches.mean(losses, torch.ones_like(losses))
        taken.close()


def test_a_loss_that_does_not_count_may_be_infinite():
    with samestep.world() as world:
        batches = samestep.shards(numbers(2), world, batch_size=2, weight=lambda batch: 1)
        for _ in batches:
            assert batches.mean(torch.tensor([2.0, torch.inf]), torch.tensor([True, False])).item() == 2.0


def two_loaders_save():
    with samestep.world() as world:
        world.step.enable_requests()
        first, second = (samestep.shards(numbers(6), world, batch_size=2) for _ in range(2))
        agreed = []
        for step, _ in enumerate(zip(first, second, strict=True)):
            if step == 0 and world.rank == 1:
                world.step.request("save")
            first.finish_step()
            second.finish_step()
            agreed.append(tuple(world.step.agreed))
        return agreed


def test_a_request_that_was_agreed_stays_until_it_is_done_whatever_loader_reports_next(two_ranks):
    assert two_ranks(two_loaders_save) == [[(), ("save",), ("save",)]] * 2


def other_data():
    with samestep.world() as world:
        try:
            return len(list(samestep.shards(numbers(8 + world.rank), world, batch_size=4)))
        except (StepError, PeerError) as error:
            return str(error)


def test_datasets_of_different_lengths_are_told_so(two_ranks):
    assert any(
        "use different settings for shards 1: the length of the dataset" in str(said) for said in two_ranks(other_data)
    )


def peek_on_one_rank():
    with samestep.world() as world:
        batches = samestep.shards(numbers(8), world, batch_size=4, weight=len)
        try:
            if world.rank == 0:
                next(iter(batches))
            return [x.tolist() for (x,) in batches]
        except (StepError, PeerError) as error:
            return str(error)


def test_ranks_that_went_different_ways_are_told_so_instead_of_given_a_wrong_weight(two_ranks):
    assert any("the ranks are out of sync" in str(said) for said in two_ranks(peek_on_one_rank))


@pytest.mark.parametrize(
    ("losses", "mask", "message"),
    [
        (torch.tensor(1.0), None, "reduced already"),
        (torch.ones(4, 3), None, "for 4 samples: without weight="),
        (torch.ones(4), torch.ones(4), "for 4 samples: without weight="),
        (torch.ones(4), torch.ones(3), "must match"),
    ],
)
def test_losses_that_would_train_something_else_are_refused(losses, mask, message):
    with samestep.world() as world:
        batches = samestep.shards(numbers(4), world, batch_size=4)
        next(taken := iter(batches))
        with pytest.raises(StepError, match=message):
            batches.mean(losses, mask)
        taken.close()


def test_mean_outside_the_loop_is_refused():
    with samestep.world() as world:
        batches = samestep.shards(numbers(4), world, batch_size=4)
        with pytest.raises(StepError, match="inside the loop"):
            batches.mean(torch.ones(4))


def test_a_commit_in_mid_step_is_refused():
    with samestep.world() as world:
        batches = samestep.shards(numbers(4), world, batch_size=4, micro_batch_size=2)
        next(taken := iter(batches))
        with pytest.raises(StepError, match="micro-batch 1 of 2"):
            batches.commit()
        taken.close()


def test_two_loops_over_the_same_shards_at_once_are_refused():
    with samestep.world() as world:
        batches = samestep.shards(numbers(4), world, batch_size=2)
        next(first := iter(batches))
        next(iter(batches))
        with pytest.raises(StepError, match="iterated elsewhere"):
            next(first)


class Augmented(Dataset):
    """Its samples depend on the epoch that it is told."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(10 * self.epoch + index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_wants_to_know_the_epoch_is_told_in_workers_too(workers):
    with samestep.world() as world:
        batches = samestep.shards(Augmented(), world, batch_size=4, shuffle=False, workers=workers)
        assert [x.tolist() for _ in range(2) for x in batches] == [[0, 1, 2, 3], [10, 11, 12, 13]]
