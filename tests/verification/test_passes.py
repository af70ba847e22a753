"""What is written down of a DataLoader whose batches somebody else cuts."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from samestep.verification.recording.datasets import described
from samestep.verification.recording.graph import scale_of, terms_of


class Half(BatchSampler):
    """Every second batch of another sampler, as launch libraries cut what a script has made."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self):
        yield from list(self.batch_sampler)[::2]


def test_the_order_is_that_of_the_sampler_whose_batches_are_cut() -> None:
    data = list(range(12))
    drawn = WeightedRandomSampler([1.0] * 12, 12)
    told = described(DataLoader(data, batch_sampler=Half(BatchSampler(drawn, 2, drop_last=True))))
    assert (told["sampler"], told["cut_by"]) == ("WeightedRandomSampler", "Half")
    assert (told["replacement"], told["drop_last"]) == (True, True)


def test_a_loader_of_its_own_is_described_by_its_sampler() -> None:
    told = described(DataLoader(list(range(12)), batch_size=2, sampler=RandomSampler(range(12))))
    assert (told["sampler"], told["cut_by"], told["drop_last"]) == ("RandomSampler", None, False)


def test_a_loss_that_is_divided_by_no_items_is_written_down() -> None:
    """It is NaN, which the script may live with; verify must not be what ends it."""
    nothing = torch.ones(3, requires_grad=True).sum() / torch.tensor(0.0)
    assert (scale_of(nothing)["loss"], scale_of(nothing)["factor"]) == ("DivBackward0", 1.0)
    assert scale_of(torch.ones(3, requires_grad=True).mean() / 4)["factor"] == 0.25


def test_a_loss_is_told_by_its_terms() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    labels = torch.tensor([1, 2, -100, 0])
    loss = nn.functional.cross_entropy(logits, labels) / 4 + 0.0 * logits.mean() - 2 * logits.sum()
    terms = {one["factor"]: (one["mean"], one["count"], one["shape"]) for one in terms_of(loss)}
    assert terms == {0.25: (True, 3.0, [4, 3]), 0.0: (True, 12.0, [4, 3]), -2.0: (False, None, [4, 3])}
    tokens = torch.tensor(3.0)
    (term,) = terms_of(nn.functional.cross_entropy(logits, labels, reduction="sum") / tokens)
    assert (term["mean"], round(term["factor"], 6)) == (False, 0.333333)
    assert terms_of(logits) == terms_of(torch.ones(())) == []
