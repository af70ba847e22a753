"""What is told of DataLoaders is what they yield, whoever loads, and however samples are numbered."""

from __future__ import annotations

import gc
import pickle
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, _utils, dataloader

from samestep.verification.checking import loaders as checking
from samestep.verification.checking import values
from samestep.verification.watching.listener import Batch, Callbacks
from samestep.verification.watching.loaders import Loaders


class Told(Callbacks):
    """Keeps what is told, pass by pass."""

    def __init__(self) -> None:
        self.passes: list[list[Batch]] = []

    def batches(self, epoch: Any, own: Any) -> Any:
        self.passes.append([])
        for batch in own:
            self.passes[-1].append(batch)
            yield batch.value


@pytest.fixture(scope="module", autouse=True)
def _no_waiting() -> Iterator[None]:
    """A worker that still loads when its loader goes is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        yield
        gc.collect()


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is as it was when the test is over."""
    for kind, names in (
        (DataLoader, ("__init__", "__iter__", "__len__")),
        (dataloader._BaseDataLoaderIter, ("_next_index", "__next__")),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, getattr(kind, name))


@pytest.fixture
def told(unchanged: None) -> Told:
    """A listener that is told of every DataLoader."""
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


class Cropped(Sampler[tuple[int, int]]):
    """Names a sample and the size that it shall have."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(0, 32), (1, 64)])


class Pictures(Dataset[int]):
    def __getitem__(self, at: tuple[int, int]) -> int:
        return at[0] * at[1]


def test_samples_that_a_sampler_names_otherwise_have_no_number(told: Told) -> None:
    assert [batch.tolist() for batch in DataLoader(Pictures(), batch_size=2, sampler=Cropped())] == [[0, 64]]
    assert [batch.indices for batch in told.passes[0]] == [None]


def test_batches_that_a_sampler_draws_as_an_array_are_numbered(told: Told) -> None:
    assert [batch.tolist() for batch in DataLoader(range(4), batch_sampler=[np.array([2, 0]), np.array([1, 3])])]
    assert [batch.indices for batch in told.passes[0]] == [[2, 0], [1, 3]]


def test_a_worker_that_is_not_forked_has_the_function_of_the_script_and_nothing_else(told: Told) -> None:
    for own in (None, print):
        loader = DataLoader(range(4), num_workers=1, worker_init_fn=own)
        assert loader.worker_init_fn is not own
        assert pickle.loads(pickle.dumps(loader.worker_init_fn)) is own
    assert told.passes == []


class Refusing(UserDict[str, Any]):
    """A batch that does not let itself be looked at."""

    def values(self) -> Any:
        raise NotImplementedError


def test_a_batch_that_cannot_be_looked_at_is_none_of_the_business_of_a_check(unchanged: None) -> None:
    checked = checking.Loaders()
    checked.watch(dataloader)
    assert [batch["all"] for batch in DataLoader(range(4), batch_size=2, collate_fn=lambda all_: Refusing(all=all_))]
    assert checked.told() == []
    for _ in DataLoader(range(4), batch_size=2):
        checked.note_step()
    assert [one.steps for one in checked.told()] == [2]


def test_a_check_tells_samples_apart_by_what_has_rows() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert values.rows((torch.eye(3).to_sparse(), x), 3, [0, 2]) == values.rows((x,), 3, [0, 2])
    assert values.rows(torch.eye(3).to_sparse(), 3, [0]) is None
