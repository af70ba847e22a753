"""Evaluation on N ranks against evaluation in one process."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, TensorDataset

import samestep
from samestep.data.batches import DevicePrefetcher
from samestep.errors import DataError, SamestepError
from samestep.testing import assert_same_bits


def sklearn(metric, *given, **options):
    """A metric of scikit-learn, imported by the rank that computes it: importing takes a second."""
    from sklearn import metrics

    return getattr(metrics, metric)(*given, **options)


SIZES = (1, 2, 3, 5, 37)
METRICS = {
    "samples": lambda o, t: len(t),
    "order": lambda o, t: t[:, 1].tolist(),
    "correct": lambda o, t: (o.argmax(1) == t[:, 0]).sum(),
    "accuracy": lambda o, t: sklearn("accuracy_score", t[:, 0], o.argmax(1)),
    "f1": lambda o, t: sklearn("f1_score", t[:, 0], o.argmax(1), average="macro", labels=[0, 1, 2], zero_division=0),
    "confusion": lambda o, t: torch.from_numpy(sklearn("confusion_matrix", t[:, 0], o.argmax(1), labels=[0, 1, 2])),
    "loss": lambda o, t: nn.functional.cross_entropy(o, t[:, 0]),
}
MEANS = ("f1", "loss")


def make_data(samples):
    torch.manual_seed(1)
    x = torch.randn(samples, 4, dtype=torch.float64)
    labels = torch.randint(0, 3, (samples,))
    return TensorDataset(x, torch.stack([labels, torch.arange(samples)], 1))


def make_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()


def evaluate_all_sizes(batch_size, workers):
    with samestep.world() as world:
        model = samestep.replicate(make_model(), world)
        return [
            samestep.evaluate(
                lambda batch: (model(batch[0]), batch[1]),
                make_data(size),
                world,
                batch_size=batch_size,
                metrics=METRICS,
                workers=workers,
            )
            for size in SIZES
        ]


@pytest.fixture(scope="module")
def alone():
    return evaluate_all_sizes(7, 0)


def test_on_a_gpu_the_next_batch_is_copied_while_one_is_computed(monkeypatch):
    """Without a GPU: the order in which copies are begun and batches computed, by a mover that has a stream."""
    said = []

    class Told(DevicePrefetcher):
        def __init__(self, device):
            super().__init__(device)
            self.stream = object()

        def send(self, batch):
            said.append(f"copies {batch[1][:, 1].tolist()}")
            return batch

        def receive(self, batch):
            return batch

    monkeypatch.setattr("samestep.evaluation.DevicePrefetcher", Told)

    def computes(batch):
        said.append(f"computes {batch[1][:, 1].tolist()}")
        return batch[0], batch[1]

    with samestep.world() as world:
        samestep.evaluate(computes, make_data(5), world, batch_size=2, metrics={})
    assert said == [
        *("copies [0, 1]", "copies [2, 3]", "computes [0, 1]"),
        *("copies [4]", "computes [2, 3]", "computes [4]"),
    ]


def assert_same_evaluation(everywhere, alone):
    for mine in everywhere:
        assert_same_bits(mine, everywhere[0])
    for result, expected in zip(everywhere[0], alone, strict=True):
        for name in METRICS:
            if name in MEANS:
                assert abs(result[name] - expected[name]) < 1e-12
            else:
                assert_same_bits(result[name], expected[name])


def test_three_ranks_give_what_one_gives_also_without_samples_for_some(three_ranks, alone):
    assert_same_evaluation(three_ranks(evaluate_all_sizes, 7, 0), alone)


def test_three_ranks_give_what_one_gives_with_a_batch_smaller_than_the_world(three_ranks, alone):
    assert_same_evaluation(three_ranks(evaluate_all_sizes, 1, 0), alone)


def test_loading_processes_change_nothing(two_ranks, alone):
    assert_same_evaluation(two_ranks(evaluate_all_sizes, 7, 1), alone)


def test_one_process_sees_every_sample_once_and_in_order(alone):
    for size, result in zip(SIZES, alone, strict=True):
        assert result["order"] == list(range(size))


def count_like_distributed_sampler(samples):
    with samestep.world() as world:
        sampler = DistributedSampler(make_data(samples), world.size, world.rank, shuffle=False)
        counted = torch.tensor(len(list(sampler)))
        torch.distributed.all_reduce(counted)
        ours = samestep.evaluate(
            lambda batch: (batch[1], batch[1]),
            make_data(samples),
            world,
            batch_size=4,
            metrics={"samples": METRICS["samples"]},
        )
        return int(counted), ours["samples"]


def test_padded_samples_count_twice_with_distributed_sampler_and_never_here(three_ranks):
    assert three_ranks(count_like_distributed_sampler, 10) == [(12, 10)] * 3


def sizes_of_batches(samples, batch_size):
    with samestep.world() as world:
        seen = []
        samestep.evaluate(
            lambda batch: (seen.append(len(batch[0])) or batch[0], batch[1]),
            make_data(samples),
            world,
            batch_size=batch_size,
            metrics={},
        )
        return seen


def test_each_rank_takes_its_share_of_the_batch_size(three_ranks):
    assert three_ranks(sizes_of_batches, 10, 6) == [[2, 2], [2, 1], [2, 1]]
    assert three_ranks(sizes_of_batches, 10, 7) == [[3, 1], [3], [3]]


def probabilities():
    with samestep.world() as world:
        torch.manual_seed(3)
        data = TensorDataset(torch.rand(41, dtype=torch.float64), torch.randint(0, 2, (41,)))
        return samestep.evaluate(
            lambda batch: batch, data, world, batch_size=8, metrics={"auc": lambda o, t: sklearn("roc_auc_score", t, o)}
        )


def test_batches_are_made_by_the_function_that_was_given():
    with samestep.world(device="cpu") as world:
        batches = []
        samestep.evaluate(
            lambda batch: (batches.append(batch.tolist()) or batch, batch),
            range(3),
            world,
            batch_size=2,
            metrics={},
            collate_fn=lambda samples: 10 * torch.tensor(samples),
        )
    assert batches == [[0, 10], [20]]


def test_auc_which_is_no_mean_is_exact(three_ranks):
    expected = probabilities()
    assert 0 < expected["auc"] < 1
    assert three_ranks(probabilities) == [expected] * 3


# --- modes and side effects ------------------------------------------------------------------


class Merging(nn.Linear):
    """Prepares for inference in train(), as layers with low-rank adapters do."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def modes_around_an_evaluation(fails):
    with samestep.world() as world:
        model = nn.Sequential(Merging(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.Linear(4, 2)))
        replica = samestep.replicate(model, world)
        model[1].eval()
        model[2][1].eval()
        before = [module.training for module in replica.modules()]
        inside = []

        def fn(batch):
            inside.append((any(module.training for module in replica.modules()), torch.is_grad_enabled()))
            inside.append(model[0].merged)
            if fails:
                raise LookupError("no such class")
            return replica(batch[0].float()), batch[1]

        try:
            samestep.evaluate(fn, make_data(6), world, batch_size=6, metrics={})
        except LookupError:
            assert fails
        return inside, before == [module.training for module in replica.modules()], model[0].merged


@pytest.mark.parametrize("fails", [False, True])
def test_every_submodule_gets_its_own_mode_back(two_ranks, fails):
    for inside, restored, merged in two_ranks(modes_around_an_evaluation, fails):
        assert inside == [(False, False), True]
        assert restored
        assert not merged


def global_random_state_around_an_evaluation():
    with samestep.world() as world:
        data = make_data(5)
        before = torch.get_rng_state()
        for workers in (0, 1):
            samestep.evaluate(lambda b: b, data, world, batch_size=2, metrics={}, workers=workers)
        return torch.equal(before, torch.get_rng_state())


def test_the_global_random_stream_is_left_alone(two_ranks):
    assert two_ranks(global_random_state_around_an_evaluation) == [True, True]


def local_statistics():
    with samestep.world() as world:
        model = nn.BatchNorm1d(1, momentum=1.0)
        replica = samestep.replicate(model, world, batchnorm="local")
        replica(torch.tensor([[0.0], [2.0]]) + 10 * world.rank)
        before = float(model.running_mean)
        result = samestep.evaluate(
            lambda batch: (replica(batch[0]), batch[0]),
            TensorDataset(torch.ones(4, 1)),
            world,
            batch_size=4,
            metrics={"largest": lambda o, t: o.abs().max()},
        )
        return before, float(model.running_mean), result["largest"]


def test_buffers_that_differ_are_made_rank_zeros_before(two_ranks):
    assert two_ranks(local_statistics) == [(1.0, 1.0, 0.0), (11.0, 1.0, 0.0)]


# --- what a metric may return ----------------------------------------------------------------


def values_of_every_kind():
    with samestep.world() as world:
        return samestep.evaluate(
            lambda batch: batch,
            make_data(5),
            world,
            batch_size=5,
            metrics={
                "nothing": lambda o, t: None,
                "scalar": lambda o, t: torch.tensor(0.1, dtype=torch.float32),
                "not finite": lambda o, t: (float("nan"), float("-inf")),
                "classes": lambda o, t: {0: torch.tensor([1, 2], dtype=torch.int16), "all": [True, "text"]},
                "array": lambda o, t: sklearn("confusion_matrix", [0, 1], [1, 1]),
                "empty": lambda o, t: torch.zeros(0, 3, dtype=torch.bfloat16),
            },
        )


def test_values_reach_every_rank_as_they_were(two_ranks):
    for result in two_ranks(values_of_every_kind):
        array = result.pop("array")
        assert (array.tolist(), array.dtype.kind) == ([[0, 1], [0, 1]], "i")
        assert_same_bits(
            result,
            {
                "nothing": None,
                "scalar": 0.10000000149011612,
                "not finite": (float("nan"), float("-inf")),
                "classes": {0: torch.tensor([1, 2], dtype=torch.int16), "all": [True, "text"]},
                "empty": torch.zeros(0, 3, dtype=torch.bfloat16),
            },
        )


# --- errors ----------------------------------------------------------------------------------


def evaluate_with(fn, data, batch_size=4, metrics=None):
    with samestep.world() as world:
        data = data(world.rank) if callable(data) else data
        samestep.evaluate(lambda b: fn(b, world.rank), data, world, batch_size=batch_size, metrics=metrics or {})


def fail_on_rank_one(batch, rank):
    if rank == 1:
        raise LookupError("no such class")
    return batch


def error_with(*given):
    try:
        evaluate_with(*given)
    except (LookupError, ArithmeticError, SamestepError) as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_on_one_rank_reaches_all_instead_of_a_hang(two_ranks):
    victim, culprit = two_ranks(error_with, fail_on_rank_one, make_data(8))
    assert culprit == "LookupError: no such class"
    assert victim == "PeerError: rank 1 failed: LookupError: no such class"


class Lost(Dataset):
    """A folder that one rank cannot list."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        if self.rank == 1:
            raise FileNotFoundError("no such folder")
        return 4

    def __getitem__(self, index):
        return index, index


def error_of_a_lost_dataset():
    with samestep.world() as world:
        try:
            samestep.evaluate(pass_on, Lost(world.rank), world, batch_size=4, metrics={})
        except Exception as error:  # noqa: BLE001  (what it is, is what is asked)
            return f"{type(error).__name__}: {error}"


def test_a_dataset_that_one_rank_cannot_measure_holds_up_no_other(two_ranks):
    other, own = two_ranks(error_of_a_lost_dataset)
    assert own == "FileNotFoundError: no such folder"
    assert other == "PeerError: rank 1 failed: FileNotFoundError: no such folder"


def raise_in_metric(outputs, targets):
    raise ZeroDivisionError("no positives")


def test_an_error_in_a_metric_reaches_all(two_ranks):
    own, other = two_ranks(error_with, pass_on, make_data(8), 4, {"precision": raise_in_metric})
    assert own == "ZeroDivisionError: no positives"
    assert other == "PeerError: rank 0 failed: ZeroDivisionError: no positives"


def pass_on(batch, rank):
    return batch


def data_that_grows_with_the_rank(rank):
    return make_data(4 + rank)


def test_ranks_with_datasets_of_different_lengths_are_told(two_ranks):
    for said in two_ranks(error_with, pass_on, data_that_grows_with_the_rank):
        assert "different lengths (rank 0: 4, rank 1: 5)" in said


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        (make_data(0), 4, "cannot evaluate an empty TensorDataset"),
        (Stream(), 4, "cannot evaluate a Stream: samples are shared out by number"),
        (NoLength(), 4, "cannot evaluate a NoLength without a length"),
        (make_data(3), 0, "batch_size must be 1 or more, got 0"),
    ],
)
def test_a_dataset_that_cannot_be_shared_out_is_refused(data, batch_size, message):
    with pytest.raises(DataError, match=message):
        evaluate_with(pass_on, data, batch_size)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda batch: batch[0], "fn must return .*; it returned a Tensor"),
        (lambda batch: (batch[0], 1.0), "fn must return .*; it returned a tuple"),
        (lambda batch: (batch[0].mean(), batch[1]), r"outputs of shape \(\) for a batch of 4 samples"),
        (lambda batch: (batch[0].mean(0, keepdim=True), batch[1]), r"outputs of shape \(1, 4\)"),
        (lambda batch: (batch[0].repeat(2, 1), batch[1]), "8 rows of outputs but 4 of targets"),
    ],
)
def test_results_without_a_row_for_each_sample_are_refused(result, message):
    with pytest.raises(DataError, match=message):
        evaluate_with(lambda batch, rank: result(batch), make_data(8))


def test_a_value_that_cannot_be_sent_is_refused_with_the_metrics_name():
    with pytest.raises(DataError, match="metric 'figure' returned a numpy.longdouble, "):
        evaluate_with(pass_on, make_data(4), 4, {"figure": lambda o, t: np.longdouble(1)})
    with pytest.raises(DataError, match="metric 'figure' returned a builtins.object"):
        evaluate_with(pass_on, make_data(4), 4, {"figure": lambda o, t: object()})


class Bad(Dataset):
    """One sample cannot be loaded, or takes its worker with it."""

    epochs = ()

    def __init__(self, what):
        self.what = what

    def set_epoch(self, epoch):
        self.epochs += (epoch,)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 4 and self.what == "raises":
            raise ValueError("no picture")
        if index == 4 and self.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1), torch.tensor(index)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "raises",
            "sample 4 cannot be loaded by worker 0 .*: ValueError: no picture, at tests/test_evaluation",
        ),
        ("dies", "worker 0 .* was killed by SIGKILL while it loaded sample 4 of micro-batch \\[4, 5\\]"),
    ],
)
def test_a_bad_sample_and_a_worker_that_dies_are_named(what, message):
    with samestep.world() as world, pytest.raises(DataError, match=message) as caught:
        samestep.evaluate(tuple, Bad(what), world, batch_size=2, metrics={}, workers=1)
    assert "\n" not in str(caught.value)


def test_a_dataset_that_is_also_trained_on_is_not_told_another_epoch():
    with samestep.world() as world:
        data = Bad("is well")
        samestep.evaluate(tuple, data, world, batch_size=2, metrics={})
        assert data.epochs == ()
