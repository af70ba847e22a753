"""Steps shared out by cost train what they trained before: N ranks against one process, in float64.

The oracle is plain torch over the samples of each step, whichever rank computes them; tolerance as in test_training.
With BatchNorm and several micro-batches it is one rank, whose micro-batches are the sets that all ranks take together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.data.costs import BucketedOrder, Buckets, Costs
from samestep.data.order import SampleOrder

SAMPLES, EPOCHS, TOLERANCE = 40, 3, 1e-12
LENGTHS = np.random.default_rng(1).lognormal(1.5, 0.8, SAMPLES).astype(int).clip(1, 30)


@dataclass(frozen=True)
class Case:
    name: str
    micro_batches: int = 1
    bucket: int | None = None
    batchnorm: bool = False


CASES = [
    Case("whole"),
    Case("accumulated", micro_batches=3),
    Case("bucketed", bucket=2),
    Case("bucketed, accumulated", bucket=3, micro_batches=2),
    Case("batchnorm", batchnorm=True),
    Case("batchnorm, accumulated", batchnorm=True, micro_batches=2),
]


class Padded(torch.utils.data.Dataset):
    """Sequences of unequal length."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(int(LENGTHS[index]), 4, generator=draw, dtype=torch.float64), torch.tensor(index % 3)


def collate(samples):
    inputs, targets = zip(*samples, strict=True)
    lengths = torch.tensor([len(part) for part in inputs])
    return nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), lengths, torch.stack(targets)


class Pooled(nn.Module):
    def __init__(self, *, batchnorm):
        super().__init__()
        torch.manual_seed(7)
        norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Sequential(norm, nn.Linear(8, 3))
        self.double()

    def forward(self, inputs, lengths):
        real = (torch.arange(inputs.shape[1]) < lengths[:, None]).unsqueeze(-1)
        return self.head((self.inner(inputs) * real).sum(1) / lengths[:, None])


def train(case: Case):
    losses = []
    with samestep.world() as world:
        model = samestep.replicate(Pooled(batchnorm=case.batchnorm), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        micro = None if case.micro_batches == 1 else 12 // (case.micro_batches * world.data.size)
        batches = samestep.shards(
            Padded(),
            world,
            batch_size=12,
            micro_batch_size=micro,
            collate_fn=collate,
            cost=LENGTHS,
            bucket=case.bucket,
            seed=3,
        )
        for _ in range(EPOCHS):
            for x, lengths, y in batches:
                batches.mean(F.cross_entropy(model(x, lengths), y, reduction="none")).backward()
                if batches.step_ends:
                    optimizer.step()
                    optimizer.zero_grad()
                    batches.commit()
                    losses.append(batches.loss)
        return losses, {name: value.clone() for name, value in model.state_dict().items()}


def train_alone(case: Case):
    losses, data, model = [], Padded(), Pooled(batchnorm=case.batchnorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        order = SampleOrder(SAMPLES, 3, epoch)
        if case.bucket is not None:
            order = BucketedOrder(order, Buckets(Costs(LENGTHS, SAMPLES), case.bucket, 12, SAMPLES))
        for start in range(0, SAMPLES, 12):
            x, lengths, y = collate([data[index] for index in order.take(start, min(start + 12, SAMPLES)).tolist()])
            loss = F.cross_entropy(model(x, lengths), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model.state_dict()


ALWAYS = {1: {"bucketed"}, 2: {"whole"}, 3: {case.name for case in CASES}}  # of ranks; the others by `make prove`
NUMBERED = [
    pytest.param(ranks, case, marks=[] if case.name in always else [pytest.mark.prove], id=f"{ranks} ranks-{case.name}")
    for ranks, always in ALWAYS.items()
    for case in CASES
]


@pytest.mark.parametrize(("count", "case"), NUMBERED)
def test_n_ranks_train_as_one_process(request, count, case):
    names = {2: "two_ranks", 3: "three_ranks"}
    ranks = request.getfixturevalue(names[count]) if count > 1 else lambda fn, *args: [fn(*args)]
    losses, state = train(case) if case.batchnorm and case.micro_batches > 1 else train_alone(case)
    for mine, found in ranks(train, case):
        assert mine == pytest.approx(losses, abs=TOLERANCE)
        for name, value in found.items():
            assert (value.double() - state[name].double()).abs().max() < TOLERANCE, name


def elastic(micro):
    """On four virtual ranks: the losses' and the parameters' bits, however many processes compute them."""
    with samestep.world(virtual_ranks=4) as world:
        model = samestep.replicate(Pooled(batchnorm=False), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = samestep.shards(
            Padded(), world, batch_size=12, micro_batch_size=micro, collate_fn=collate, cost=LENGTHS, bucket=2
        )
        losses = []
        for x, lengths, y in batches:
            batches.mean(F.cross_entropy(model(x, lengths), y, reduction="none")).backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                batches.commit()
                losses.append(batches.loss)
        return losses, {name: value.clone() for name, value in model.module.state_dict().items()}


@pytest.mark.parametrize("micro", [None, 2])
def test_virtual_ranks_share_a_step_out_alike_on_one_rank_and_on_two(two_ranks, micro):
    losses, state = elastic(micro)
    for mine, found in two_ranks(elastic, micro):
        assert mine == losses
        samestep.testing.assert_same_bits(found, state)
