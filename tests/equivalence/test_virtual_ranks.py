"""Virtual ranks: the same bits on 1, 2 and 4 ranks, through dropout, BatchNorm, augmentation, resumes; no tolerance.

The oracles: the run on one rank, for the bits; a loop of plain torch over the virtual ranks' slices one after another,
for what they mean (test_one_rank_is_the_plain_loop); plain torch over the whole batch, in float64, for the step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.data.order import SampleOrder
from samestep.errors import CheckpointError, DataError, ModelError, RankFailure, StepError, UsageError
from samestep.seeding import derive_seed
from samestep.testing import assert_same_bits
from samestep.topology import cut_evenly, tree_sum

SAMPLES, BATCH = 37, 12  # 12, 12, 12, 1: in the last step most slices are empty
VIRTUAL = 4


class Pictures(torch.utils.data.Dataset):
    """Small pictures, each with noise from the three generators that augmentations draw from, if asked."""

    def __init__(self, noise=True, dtype=torch.float32):
        self.noise, self.dtype = noise, dtype

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        picture = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(index), dtype=self.dtype)
        if self.noise:
            picture = picture + 0.1 * torch.randn(3, 6, 6) + random.random() + np.random.rand()
        return picture, index % 5


@dataclass(frozen=True)
class Case:
    name: str
    layers: tuple[str, ...] = ("conv",)
    optimizer: str = "sgd"
    micro_batch_size: int | None = None
    workers: int = 0
    weighted: bool = False
    max_norm: float | None = None
    zero_grad_first: bool = False
    batch_size: int = BATCH
    virtual: int = VIRTUAL


CASES = [
    Case("plain"),
    Case("dropout", layers=("conv", "dropout")),
    Case("batchnorm", layers=("conv", "norm"), batch_size=18),
    Case("everything", ("conv", "norm", "dropout"), "adamw", workers=1, weighted=True, max_norm=0.5, batch_size=18),
    Case("accumulated", ("conv", "dropout"), micro_batch_size=2),
    Case("gradients set to zero at the start of each micro-batch", ("conv", "dropout"), zero_grad_first=True),
    Case("a layer that no slice uses", ("conv", "idle"), "adamw"),
    Case("channels last", ("conv", "channels last")),
    Case("two dtypes", ("conv", "double head"), "adamw", max_norm=0.5),
    Case("eight virtual ranks", ("conv", "dropout"), "adamw", virtual=8),
]


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8) if "norm" in layers else nn.Identity()
        self.dropout = nn.Dropout(0.3) if "dropout" in layers else nn.Identity()
        self.idle = nn.Linear(2, 2) if "idle" in layers else None
        self.head = nn.Linear(128, 5, dtype=torch.float64 if "double head" in layers else None)
        if "channels last" in layers:
            self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.conv(x)).relu()).flatten(1).to(self.head.weight.dtype))


def make_optimizer(case, model):
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(case, epochs=2, path=None, until=None):
    """Trains, on however many ranks this is run; `until` so many steps, if given, and then leaves in mid-epoch."""
    record = {"losses": []}
    with samestep.world(virtual_ranks=case.virtual, seed=1) as world:
        model = samestep.replicate(Net(case.layers), world, batchnorm="local")
        optimizer = make_optimizer(case, model)
        batches = samestep.shards(
            Pictures(),
            world,
            batch_size=case.batch_size,
            micro_batch_size=case.micro_batch_size,
            weight=(lambda batch: 0.1 * (1 + batch[1]).sum()) if case.weighted else None,
            workers=case.workers,
            drop_last="norm" in case.layers,
            seed=3,
        )
        state = samestep.checkpoint(path, world, every=1, model=model, optimizer=optimizer, data=batches)
        for _ in state.epochs(epochs):
            for x, y in batches:
                if case.zero_grad_first:
                    optimizer.zero_grad()
                losses = F.cross_entropy(model(x), y, reduction="none")
                batches.mean(losses * 0.1 * (1 + y) if case.weighted else losses).backward()
                if not batches.step_ends:
                    continue
                if case.max_norm is not None:
                    samestep.clip_grad_norm_(model, case.max_norm)
                record["gradients"] = {
                    name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
                }
                optimizer.step()
                if not case.zero_grad_first:
                    optimizer.zero_grad()
                state.commit()
                record["losses"].append(batches.loss)
                if state.step == until:
                    state.wait()
                    return record
        record["evaluated"] = samestep.evaluate(
            lambda batch: (model(batch[0]), batch[1]), Pictures(), world, batch_size=8, metrics={"all": kept}
        )
        record["state"] = {name: value.clone() for name, value in model.state_dict().items()}
        record["optimizer"] = optimizer.state_dict()["state"]
        record["drawn"] = [torch.rand(2), random.random(), np.random.rand()]
    return record


def kept(outputs, targets):
    return outputs * targets[:, None]


def on(request, size):
    if size == 1:
        return lambda fn, *args, **more: [alone(fn, *args, **more)]
    return request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[size])


def alone(fn, *args):
    """In this process, whose threads and streams are given back."""
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    torch.manual_seed(0)
    try:
        return fn(*args)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(before)


# `everything` has the first three
PROVEN = {"plain", "dropout", "batchnorm", "channels last", "eight virtual ranks", "two dtypes"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.prove] if case.name in PROVEN else [], id=case.name) for case in CASES],
)
def test_any_number_of_ranks_gives_the_same_bits(request, case):
    expected = alone(train, case)
    for size in (2, 4):
        for record in on(request, size)(train, case):
            assert_same_bits(record, expected)


def test_the_number_of_virtual_ranks_is_part_of_the_run():
    """What the other tests compare could not differ if nothing here did."""
    case = CASES[1]
    four, eight = alone(train, case), alone(train, replace(case, virtual=8))
    assert four["losses"] != eight["losses"]


@pytest.mark.parametrize(
    "sizes",
    [(4, 1, 2), *(pytest.param(sizes, marks=pytest.mark.prove) for sizes in ((4, 1, 2, 4), (1, 4), (2, 2), (2, 1)))],
    ids=lambda sizes: " to ".join(map(str, sizes)),
)
def test_a_run_may_change_its_size_in_mid_epoch_without_one_bit_changed(request, tmp_path, sizes):
    case = Case("all", ("conv", "norm", "dropout"), "adamw", batch_size=8)
    whole = alone(train, case, 3)
    for number, size in enumerate(sizes[:-1]):
        on(request, size)(train, case, 3, tmp_path / "run", 2 + 3 * number)
    for record in on(request, sizes[-1])(train, case, 3, tmp_path / "run"):
        done = len(record["losses"])
        assert 0 < done < len(whole["losses"])
        assert record["losses"] == whole["losses"][-done:]
        del record["losses"]
        assert_same_bits(record, {name: value for name, value in whole.items() if name != "losses"})


def test_one_rank_is_the_plain_loop():
    losses, state = alone(plain_loop)
    record = alone(train_without_noise)
    assert record["losses"] == losses
    assert_same_bits(record["state"], state)


def plain_loop():
    """The meaning, spelt out: each slice by itself, its streams, its gradient; added in pairs."""
    torch.set_num_threads(1)
    torch.manual_seed(derive_seed(1, "model"))
    net = Net(("conv", "dropout"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    data = Pictures(noise=False)
    for start in range(0, SAMPLES, BATCH):
        order = SampleOrder(SAMPLES, seed=3, epoch=0).take(start, min(start + BATCH, SAMPLES))
        parts, values = [], []
        for number, (first, last) in enumerate(cut_evenly(len(order), VIRTUAL)):
            samples = [data[int(index)] for index in order[first:last]]
            x = torch.stack([picture for picture, _ in samples]) if samples else torch.empty(0, 3, 6, 6)
            y = torch.tensor([label for _, label in samples], dtype=torch.int64)
            torch.manual_seed(derive_seed(1, "slice", number, 2, 0, start))  # 2: the model is the world's first thing
            loss = F.cross_entropy(net(x), y, reduction="none").sum() / float(len(order))
            net.zero_grad()
            loss.backward()
            values.append(loss.item())
            parts.append([parameter.grad for parameter in net.parameters()])
        for parameter, gradients in zip(net.parameters(), zip(*parts, strict=True), strict=True):
            parameter.grad = tree_sum(gradients)
        optimizer.step()
        losses.append(tree_sum(values))
    return losses, dict(net.state_dict())


def train_without_noise():
    record = {"losses": []}
    with samestep.world(virtual_ranks=VIRTUAL, seed=1) as world:
        model = samestep.replicate(Net(("conv", "dropout")), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = samestep.shards(Pictures(noise=False), world, batch_size=BATCH, seed=3)
        for x, y in batches:
            batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                batches.commit()
                record["losses"].append(batches.loss)
        record["state"] = {name: value.clone() for name, value in model.state_dict().items()}
    return record


def steps_of(virtual):
    """Gradients in float64, of a model that draws nothing."""
    found = []
    with samestep.world(virtual_ranks=virtual) as world:
        model = samestep.replicate(Net(()).double(), world)
        batches = samestep.shards(Pictures(noise=False, dtype=torch.float64), world, batch_size=BATCH, seed=3)
        for x, y in batches:
            batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            if batches.step_ends:
                found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
                model.zero_grad()
        found.append(model.state_dict())
    return found


def test_a_step_means_what_the_whole_batch_means():
    """1e-14: gradients of order 0.1 as sums of 12 terms in another order; measured 4e-17."""
    found = alone(steps_of, VIRTUAL)
    net = Net(()).double()
    net.load_state_dict(found.pop())
    data = Pictures(noise=False, dtype=torch.float64)
    for number, mine in enumerate(found):
        order = SampleOrder(SAMPLES, seed=3, epoch=0).take(number * BATCH, min((number + 1) * BATCH, SAMPLES))
        x = torch.stack([data[int(index)][0] for index in order])
        net.zero_grad()
        F.cross_entropy(net(x), torch.from_numpy(order % 5)).backward()
        whole = {name: parameter.grad for name, parameter in net.named_parameters()}
        assert samestep.testing.largest_difference(mine, whole) < 1e-14


def two_losses():
    """Two backwards a step of one model, and one of another that takes the first one's output."""
    with samestep.world(virtual_ranks=VIRTUAL) as world:
        first = samestep.replicate(nn.Sequential(nn.Flatten(), nn.Linear(108, 5)), world)
        second = samestep.replicate(nn.Linear(5, 2), world)
        batches = samestep.shards(Pictures(noise=False), world, batch_size=BATCH)
        beside = samestep.shards(Pictures(noise=False), world, batch_size=BATCH, seed=9)
        for (x, y), (other, _) in zip(batches, beside, strict=True):
            outputs = first(x)
            batches.mean(F.cross_entropy(outputs, y, reduction="none")).backward(retain_graph=True)
            batches.mean(second(outputs).square().sum(1)).backward()
            beside.mean(first(other).square().sum(1)).backward()
            if batches.step_ends:
                return [parameter.grad.clone() for model in (first, second) for parameter in model.parameters()]
    return None


def test_several_backwards_models_and_loaders_side_by_side(two_ranks, four_ranks):
    expected = alone(two_losses)
    for record in two_ranks(two_losses) + four_ranks(two_losses):
        assert_same_bits(record, expected)


def gradients_carried_over():
    """A script that leaves zero_grad() to every other step: the second adds to the first, once and not once a slice."""
    with samestep.world(virtual_ranks=VIRTUAL) as world:
        model = samestep.replicate(nn.Sequential(nn.Flatten(), nn.Linear(108, 5)), world)
        batches = samestep.shards(Pictures(noise=False), world, batch_size=BATCH)
        found = []
        for x, y in batches:
            batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            if batches.step_ends:
                found.append(next(model.parameters()).grad.clone())
        return found


def test_gradients_that_were_there_are_added_to_once(two_ranks):
    expected = alone(gradients_carried_over)
    for record in two_ranks(gradients_carried_over):
        assert_same_bits(record, expected)


# --- refusals --------------------------------------------------------------------------------


def test_a_number_that_is_no_power_of_two_or_smaller_than_the_world_is_refused(two_ranks):
    with pytest.raises(UsageError, match=r"virtual_ranks=3 on 1 ranks: it must be a power of two"):
        samestep.world(virtual_ranks=3)
    with pytest.raises(RankFailure, match="virtual_ranks=1 on 2 ranks"):
        two_ranks(too_few)


def too_few():
    samestep.world(virtual_ranks=1)


@pytest.fixture
def world():
    threads = torch.get_num_threads()
    with samestep.world(virtual_ranks=2) as world:
        yield world
    torch.set_num_threads(threads)


def test_batchnorm_over_all_ranks_is_refused(world):
    with pytest.raises(ModelError, match="batchnorm='local'"):
        samestep.replicate(Net(("norm",)), world)


def test_an_optimizer_that_steps_in_mid_step_is_refused(world):
    model = samestep.replicate(Net(()), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = samestep.shards(Pictures(), world, batch_size=4)
    loop = iter(batches)
    x, y = next(loop)
    batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()
    x, y = next(loop)
    with pytest.raises(StepError, match="under `if batches.step_ends:`"):
        model(x)


def test_a_backward_outside_the_loop_is_refused(world):
    model = samestep.replicate(Net(()), world)
    with pytest.raises(StepError, match="outside the loop over samestep.shards"):
        model(torch.ones(1, 3, 6, 6)).sum().backward()


def test_sparse_gradients_are_refused(world):
    model = samestep.replicate(nn.Embedding(5, 2, sparse=True), world)
    batches = samestep.shards(Pictures(), world, batch_size=4)
    loop = iter(batches)
    batches.mean(model(next(loop)[1]).sum(1)).backward()
    with pytest.raises(ModelError, match="sparse=False"):
        next(loop)


def test_samples_that_draw_from_the_rank_s_streams_are_refused(world):
    with pytest.raises(DataError, match="not with virtual ranks"):
        samestep.shards(Pictures(), world, batch_size=4, sample_streams=False)


def test_loaders_at_different_slices_are_refused(world):
    one, other = (samestep.shards(Pictures(), world, batch_size=4) for _ in range(2))
    ahead = iter(one)
    next(ahead)
    next(ahead)
    with pytest.raises(StepError, match="iterate them side by side"):
        next(iter(other))


def test_a_checkpoint_of_another_number_is_refused(tmp_path):
    case = CASES[0]
    alone(train, case, 1, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"and this world has 2: .* Give world\(virtual_ranks=4\)"):
        alone(train, replace(case, virtual=2), 2, tmp_path / "run")


def plainly(path, virtual):
    with samestep.world(virtual_ranks=virtual) as world:
        samestep.checkpoint(path, world, model=nn.Linear(1, 1)).save()


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(2, None, "virtual_ranks 2 and goes on with none"), (None, 2, "none and goes on with 2")],
)
def test_going_on_with_or_without_virtual_ranks_alone_is_warned_of(tmp_path, before, after, text):
    alone(plainly, tmp_path, before)
    with pytest.warns(UserWarning, match=text):
        alone(plainly, tmp_path, after)


def test_other_threads_than_when_it_was_saved_are_warned_of(tmp_path):
    alone(threaded, tmp_path, 1)
    with pytest.warns(UserWarning, match="saved with 1 CPU threads a rank, this one has 2"):
        alone(threaded, tmp_path, 2)


def threaded(path, threads):
    with samestep.world(virtual_ranks=2) as world:
        torch.set_num_threads(threads)
        samestep.checkpoint(path, world, model=nn.Linear(1, 1)).save()


def test_statistics_loaded_between_steps_are_those_of_all_slices(world):
    model = samestep.replicate(nn.BatchNorm1d(2), world, batchnorm="local")
    buffers = model.slices.buffers
    for place in range(2):
        model.slices.begin_slice(place)
        model(torch.rand(4, 2) + place)
        model.slices.end_slice(place)
    means = buffers.state()["running_mean"]
    assert not torch.equal(means[0], means[1])
    assert torch.equal(model.module.running_mean, means[0])
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    model.slices.begin_slice(0)
    assert torch.equal(model.module.running_mean, means[0] + 1)
    model.slices.end_slice(0)
    assert buffers.state() == {}
