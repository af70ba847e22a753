"""A random stream of its own for every sample, so that augmentation does not depend on who loads it.

torch seeds each DataLoader worker, and a sample's augmentation then depends on which worker loads it, and after how
many others: another number of workers or ranks, or a resume, is other data. Here the three generators that transforms
draw from are seeded before each sample from (seed, epoch, index):

    Python's random       64 bits     all of the word                  word = SplitMix64(key of (seed, epoch), index)
    NumPy's global        32 bits     its upper half
    torch's, on the CPU   32 bits     its lower half (torch takes a longer seed and ignores the rest)

Two halves, because NumPy and torch are the same Mersenne Twister and would draw the same numbers from the same seed.

It costs 7 us a sample (3.3 for Python's generator, 2 for each of the others), and where the rank loads by itself, with
workers=0, 0.1 ms a micro-batch to keep the rank's own streams as they were. Datasets that cannot draw (a
TensorDataset, a list) are not charged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from samestep.runtime.seeds import RngState
from samestep.seeding import GOLDEN, derive_seed, splitmix64

__all__: list[str] = []

HOST = torch.device("cpu")
_PLAIN = {TensorDataset, list, tuple, range}


@dataclass(frozen=True)
class SampleSeeds:
    """The streams of a run's samples; `seed` is that of the order."""

    seed: int

    def words(self, epoch: int, indices: list[int]) -> list[int]:
        """Returns what the streams of these samples are seeded from, 64 bits each."""
        return self._words("samples", epoch, indices)

    def enter(self, epoch: int, position: int) -> None:
        """Seeds the generators for what is done to a whole micro-batch: the one that starts at `position`."""
        seed_global_rngs(self._words("batches", epoch, [position])[0])

    def _words(self, purpose: str, epoch: int, numbers: list[int]) -> list[int]:
        key = derive_seed(self.seed, purpose, epoch)
        steps = np.array(numbers, dtype=np.uint64) * np.uint64(GOLDEN)
        words: list[int] = splitmix64(steps + np.uint64(key)).tolist()
        return words


def seed_global_rngs(word: int) -> None:
    """Seeds the three generators from 64 bits."""
    random.seed(word)
    np.random.seed(word >> 32)  # noqa: NPY002  (the global generator is the one that transforms draw from)
    torch.default_generator.manual_seed(word & 0xFFFFFFFF)  # torch.manual_seed, at 60 times the price, sees to GPUs


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Gives the three generators back as they were."""
    before = RngState.taken(HOST)
    try:
        yield
    finally:
        before.put_back()


def is_deterministic_dataset(dataset: Any) -> bool:
    """Whether a dataset is one of those that hold their samples, and cannot draw a random number."""
    if type(dataset) is Subset:
        return is_deterministic_dataset(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_deterministic_dataset(part) for part in dataset.datasets)
    return type(dataset) in _PLAIN
