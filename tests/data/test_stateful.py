import gc
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, _utils

import samestep
from samestep.errors import DataError

with warnings.catch_warnings():  # torch's own about what torchdata calls
    warnings.simplefilter("ignore", UserWarning)
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install torchdata"
    )


class Numbers(Dataset):
    def __init__(self, rank, size):
        self.first = 100 * rank
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.tensor(self.first + index)}


class Walk(IterableDataset):
    """A stream that keeps its own position."""

    def __init__(self, rank, size):
        self.first = 100 * rank
        self.size = size
        self.at = 0

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            yield {"x": torch.tensor(self.first + self.at - 1)}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def loader_of(kind, rank, sizes, **options):
    draw = torch.Generator().manual_seed(5) if kind is Numbers else None
    shuffle = {"shuffle": True, "generator": draw} if kind is Numbers else {}
    return stateful.StatefulDataLoader(kind(rank, sizes[rank]), batch_size=2, **shuffle, **options)


def run(*given):
    """Trains; a worker that still loads when its loader goes is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        found = trained(*given)
        gc.collect()
    return found


def trained(kind, sizes, path, options, stop=None, batch_size=None):
    """Trains two epochs, or up to a step; returns the samples of each step of this rank."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
    with samestep.world() as world:
        loader = loader_of(kind, world.rank, sizes, **options)
        batches = samestep.shards(loader, world, batch_size=batch_size or 2 * world.size)
        state = samestep.checkpoint(path, world, every=1, model=nn.Linear(1, 1), data=batches)
        steps, samples = [], []
        for _ in state.epochs(2):
            for batch in batches:
                value = batches.mean(torch.ones(len(batch["x"]), dtype=torch.float64))
                samples += batch["x"].tolist()
                if not batches.step_ends:
                    continue
                steps.append((samples, value.item()))
                samples = []
                state.commit()
                assert batches.loss == pytest.approx(1.0)
                if state.step == stop:
                    state.wait()
                    return steps
        return steps


def test_ranks_whose_loaders_are_unequal_end_at_the_same_step(two_ranks):
    first, second = two_ranks(run, Walk, [5, 2], None, {})
    assert first[:3] == [([0, 1], 0.5), ([2, 3], 1.0), ([4], 1.0)]
    assert second[:3] == [([100, 101], 0.5), ([], 0.0), ([], 0.0)]
    assert (first[3:], second[3:]) == (first[:3], second[:3])


def test_several_batches_of_a_loader_make_a_step_where_batch_size_says_so():
    assert [x for x, _ in run(Walk, [7], None, {}, None, 4)][:2] == [[0, 1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("kind", "workers", "stops"),
    [  # 2: where rank 1 has just ended, 5: at the end of an epoch; 1 and 6: in mid-epoch, and behind an epoch
        (Numbers, 0, (1, 5)),
        pytest.param(Walk, 0, (2, 6), marks=pytest.mark.prove),
        (Walk, 1, (2,)),
        *(pytest.param(kind, 0, (1, 2, 5, 6), marks=pytest.mark.prove) for kind in (Numbers, Walk)),
        *(pytest.param(kind, 1, (2, 5), marks=pytest.mark.prove) for kind in (Numbers, Walk)),
    ],
)
def test_a_resume_goes_on_from_every_loaders_own_state(two_ranks, tmp_path, kind, workers, stops):
    sizes, options = [9, 4], {"num_workers": workers}
    whole = two_ranks(run, kind, sizes, None, options)
    for stop in stops:
        path = str(tmp_path / str(stop))
        before = two_ranks(run, kind, sizes, path, options, stop)
        after = two_ranks(run, kind, sizes, path, options)
        assert [b + a for b, a in zip(before, after, strict=True)] == whole, stop


def test_on_another_number_of_ranks_the_epoch_begins_anew_and_says_so(two_ranks, tmp_path, capfd):
    two_ranks(run, Walk, [9, 4], str(tmp_path), {}, 2)
    steps = run(Walk, [5], str(tmp_path), {})
    assert [x for x, _ in steps] == [[0, 1], [2, 3], [4]] * 2
    assert (
        "epoch 0 begins anew: the data split themselves, and were saved in mid-epoch by 2 ranks"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 3}, "batch_size 3 is no multiple of what 1 ranks load at once"),
        ({"workers": 1}, "are the loader's own"),
        ({"shuffle": True}, "its order is its own"),
    ],
)
def test_what_is_the_loaders_own_is_refused(options, message):
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
    with samestep.world() as world, pytest.raises(DataError, match=message):
        samestep.shards(loader_of(Walk, 0, [4]), world, **{"batch_size": 2, **options})
