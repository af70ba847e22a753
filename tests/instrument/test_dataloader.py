"""What is told of DataLoaders is what they yield, whoever loads, and however samples are numbered."""

from __future__ import annotations

import gc
import pickle
import random
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    _utils,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.instrument import dataloader as instrument
from samestep.instrument.callbacks import Callbacks, LoadedBatch, LoaderPass, PassIterator, subscribe
from samestep.launch.rank.observers import RankContext
from samestep.verification.online.checker import Checker
from samestep.verification.online.samples import rows


class Told(Callbacks):
    """Keeps what is told, pass by pass."""

    def __init__(self) -> None:
        self.passes: list[list[LoadedBatch]] = []
        self.owns: list[PassIterator] = []

    def on_pass(self, loader_pass: LoaderPass, own: PassIterator) -> Any:
        del loader_pass
        self.passes.append([])
        self.owns.append(own)
        return self.kept(own)

    def kept(self, own: PassIterator) -> Any:
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


class WithWorkers(Told):
    """Also of workers."""

    def on_worker(self, key: str, worker: int, states: dict[str, bytes], used: list[str]) -> None:
        pass


@pytest.fixture
def told() -> Told:
    """A subscriber that is told of every DataLoader."""
    listener = WithWorkers()
    subscribe(listener, instrument.passes)
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

    def __iter__(self) -> Any:
        raise NotImplementedError


def test_a_batch_that_cannot_be_looked_at_is_none_of_the_business_of_a_check() -> None:
    checker = Checker()
    checker.begin(RankContext(rank=0, size=1))
    assert [batch["all"] for batch in DataLoader(range(4), batch_size=2, collate_fn=lambda all_: Refusing(all=all_))]
    assert checker._passes == {}
    for _ in DataLoader(range(4), batch_size=2):
        for one in checker._passes.values():
            one.train()
    assert [one.summary().steps for one in checker._passes.values()] == [2]
    assert not checker.is_off


def test_a_scripts_iterator_is_its_own_where_nobody_replaces_it() -> None:
    subscribe(Callbacks(), instrument.passes)
    loader = DataLoader(range(4), batch_size=2)
    assert isinstance(iter(loader), _BaseDataLoaderIter)
    assert loader.worker_init_fn is None


def test_a_check_tells_samples_apart_by_what_has_rows() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert rows((torch.eye(3).to_sparse(), x), 3, [0, 2]) == rows((x,), 3, [0, 2])
    assert rows(torch.eye(3).to_sparse(), 3, [0]) is None


# --- orders that are read without the data ---


class Unreadable(Dataset[int]):
    """A dataset of which only so many samples may be loaded."""

    def __init__(self, size: int, loaded: int) -> None:
        self.size, self.left = size, loaded

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.left -= 1
        assert self.left >= 0
        return index


def whole(told: Told, loader: DataLoader[Any], taken: int) -> tuple[list[int], list[int]]:
    """Returns what a pass yields in its first batches, and what is read of its rest."""
    batches = iter(loader)
    first = [index for _ in range(taken) for index in next(batches).tolist()]
    rest = told.owns[-1].rest(len(loader))
    return first, [index for batch in rest or [] for index in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_a_pass_is_read_without_its_data(told: Told, workers: int) -> None:
    size = 1000
    data = Unreadable(size, size if workers else 6)  # workers load ahead
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
    expected = list(sampler)
    first, rest = whole(told, DataLoader(data, 3, sampler=sampler, num_workers=workers), 2)
    assert first + rest == expected


@pytest.mark.parametrize("replacement", [False, True])
def test_random_numbers_are_drawn_afterwards_as_if_nothing_had_been_read(told: Told, replacement: bool) -> None:
    drawn = []
    for reads in (False, True):
        torch.manual_seed(0), random.seed(0)
        generator = torch.Generator().manual_seed(1)
        sampler = RandomSampler(range(100), replacement=replacement, generator=generator)
        batches = iter(DataLoader(range(100), 3, sampler=sampler))
        next(batches)
        if reads:
            assert len([index for batch in told.owns[-1].rest(34) or [] for index in batch]) == 97
        drawn.append((torch.rand(2).tolist(), random.random(), torch.rand(2, generator=generator).tolist()))
    assert drawn[0] == drawn[1]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0

    def __len__(self) -> int:
        return 8


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def test_what_has_no_end_or_no_numbers_is_not_read(told: Told) -> None:
    for loader in (DataLoader(range(8), 2, sampler=Endless()), DataLoader(Stream(), 2)):
        next(iter(loader))
        assert told.owns[-1].rest(4) is None


def test_a_pass_too_long_to_be_read_is_left() -> None:
    loader = DataLoader(range(instrument._MOST + 2), 2)
    assert instrument.rest(loader, len(loader), [], iter([[0]]), 0) is None
