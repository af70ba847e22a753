import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import samestep
from samestep.data.loader import SampleSeeds, is_deterministic_dataset, seed_global_rngs
from samestep.data.order import SampleOrder
from samestep.runtime.rng import HOST, preserve_rng

# Golden: what samples are augmented with must stay the same over a resume.
WORDS = [10582652636192401712, 17984425106276887542, 14019343095577395773]


class Augmented(Dataset):
    """Each sample is its index and a draw from each of the three generators; odd ones draw twice."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        for _ in range(1 + index % 2):
            drawn = [random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


def drawn(workers, resume_at=None, **options):
    """Two epochs of this rank's samples with what they drew: {(epoch, index): draws}."""
    with samestep.world() as world:
        found = {}
        batches = samestep.shards(Augmented(), world, batch_size=4, workers=workers, seed=5, **options)
        if resume_at is not None:
            for step, _ in enumerate(batches):
                if step == resume_at:
                    break
                batches.commit()
            state = batches.state_dict()
            batches = samestep.shards(Augmented(), world, batch_size=4, workers=workers, seed=5, **options)
            batches.load_state_dict(state)
        while (epoch := batches.epoch) < 2:
            found.update({(epoch, int(row[0])): tuple(row[1:].tolist()) for batch in batches for row in batch})
        return found


@pytest.fixture(scope="module")
def reference():
    found = drawn(0)
    assert len(set(found.values())) == 2 * 22
    return found


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("workers", [0, 1, pytest.param(3, marks=pytest.mark.prove)])
def test_augmentation_depends_neither_on_ranks_nor_on_workers(workers, reference, two_ranks, four_ranks):
    assert drawn(workers) == reference
    for ranks in (two_ranks, four_ranks):
        together = {}
        for part in ranks(drawn, workers):
            together |= part
        assert together == reference


@pytest.mark.parametrize("workers", [0, 1])
def test_after_a_resume_in_mid_epoch_samples_draw_as_they_would_have(workers, reference, two_ranks):
    behind = {(0, index) for index in SampleOrder(22, seed=5).take(0, 12).tolist()}
    expected = {key: value for key, value in reference.items() if key not in behind}
    first, second = two_ranks(drawn, workers, 3)
    assert first | second == expected


def test_micro_batches_do_not_change_it(reference):
    assert drawn(0, micro_batch_size=1) == reference


def test_another_seed_or_epoch_draws_other_numbers():
    streams = SampleSeeds(0)
    assert streams.words(0, [0, 1, 17]) == WORDS
    words = [*streams.words(0, [0, 1]), *streams.words(1, [0, 1]), *SampleSeeds(1).words(0, [0, 1])]
    assert len(set(words)) == 6


def test_numpy_and_torch_do_not_draw_the_same_numbers():
    seed_global_rngs(WORDS[0])
    of_numpy = np.random.randint(0, 2**32, 100, dtype=np.uint32) >> 1
    of_torch = torch.empty(100, dtype=torch.int32).random_().numpy().astype(np.uint32)
    assert not set(of_numpy.tolist()) & set(of_torch.tolist())


def states():
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()


def test_the_ranks_own_streams_go_on_as_if_nothing_had_been_loaded():
    with samestep.world() as world:
        np.random.randn()  # half a pair of normals is kept for the next call
        random.gauss(0, 1)
        before = states()
        list(samestep.shards(Augmented(), world, batch_size=4))
        assert states() == before


def test_they_are_given_back_after_an_error_too():
    before = states()
    with pytest.raises(ZeroDivisionError), preserve_rng(HOST):
        random.seed(random.getrandbits(8) // 0)
    assert states() == before


def test_without_sample_streams_samples_draw_from_the_ranks_own():
    with samestep.world() as world:
        torch.manual_seed(1)
        expected = torch.rand(22, dtype=torch.float64).tolist()
        torch.manual_seed(1)
        batches = samestep.shards(OneDraw(), world, batch_size=22, sample_streams=False)
        assert [x.tolist() for x in batches] == [expected]


class OneDraw(Augmented):
    def __getitem__(self, index):
        return torch.rand((), dtype=torch.float64)


def test_a_collate_function_draws_the_same_with_and_without_workers():
    def noisy(samples):
        return torch.stack([row for (row,) in samples]) + torch.rand(1)

    with samestep.world() as world:
        data = TensorDataset(torch.arange(8.0))
        batches = [list(samestep.shards(data, world, batch_size=4, workers=w, collate_fn=noisy)) for w in (0, 1)]
        assert torch.equal(torch.stack(batches[0]), torch.stack(batches[1]))


@pytest.mark.parametrize(
    ("dataset", "nothing"),
    [
        (TensorDataset(torch.ones(2)), True),
        ([1, 2], True),
        (Subset(TensorDataset(torch.ones(2)), [0]), True),
        (ConcatDataset([TensorDataset(torch.ones(2)), Augmented()]), False),
        (Subset(Augmented(), [0]), False),
        (type("Mine", (TensorDataset,), {})(torch.ones(2)), False),
    ],
    ids=["tensors", "list", "subset", "concat", "subset of another", "subclass"],
)
def test_only_datasets_that_cannot_draw_are_spared_the_seeding(dataset, nothing):
    assert is_deterministic_dataset(dataset) is nothing
