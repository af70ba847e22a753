"""What is told of DataLoaders is what they yield, whoever loads, and however samples are numbered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, dataloader

from samestep.verification.watching.listener import Batch, Listener
from samestep.verification.watching.loaders import Loaders


class Told(Listener):
    """Keeps what is told, pass by pass."""

    def __init__(self) -> None:
        self.passes: list[list[Batch]] = []

    def batches(self, epoch: Any, own: Any) -> Any:
        self.passes.append([])
        for batch in own:
            self.passes[-1].append(batch)
            yield batch.value


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """A listener that is told of every DataLoader; torch is as it was when the test is over."""
    for kind, names in (
        (DataLoader, ("__init__", "__iter__", "__len__")),
        (dataloader._BaseDataLoaderIter, ("_next_index",)),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, getattr(kind, name))
    listener = Told()
    Loaders(listener).watch(dataloader)
    return listener


def test_workers_that_stay_are_told_of_in_every_pass_as_they_load(told: Told) -> None:
    torch.manual_seed(0)
    loader = DataLoader(range(24), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True)
    passes = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert passes[0] != passes[1]
    assert [[batch.indices for batch in each] for each in told.passes] == passes


def test_a_pass_that_was_left_early_says_nothing_of_the_next(told: Told) -> None:
    torch.manual_seed(0)
    loader = DataLoader(range(24), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)
    next(iter(loader))
    assert [batch.tolist() for batch in loader] == [batch.indices for batch in told.passes[1]]
