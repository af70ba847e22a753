"""Which samples all ranks together have trained on in one pass over the data, as a bit map. No torch here.

Of a pass nothing is said unless an index means one sample on all ranks, and every sample should come once: samplers of
torch's own, without replacement; and datasets that have shown the same values for a few indices, but for a
DistributedSampler, which cuts one dataset by its nature. Where loading is random (augmentation) values differ, and
nothing is said either.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from samestep.verification.checking.letters import Pass
from samestep.verification.findings import Finding
from samestep.verification.judging.words import plural

__all__: list[str] = []

MOST = 1 << 25  # samples of a dataset that is looked at: a byte each on rank 0
_MOST_PASSES = 4  # of which a map is kept
_FEWEST = 2  # steps that make a pass a training; and samples that make two datasets one
_CUTS = "DistributedSampler"


def packed(indices: Sequence[int]) -> str:
    """Returns sample numbers as text."""
    return base64.b64encode(np.asarray(indices, dtype="<i8").tobytes()).decode()


def unpacked(text: str) -> np.ndarray:
    """Returns the numbers, int64, shape [samples]."""
    return np.frombuffer(base64.b64decode(text), dtype="<i8")


class Seen:
    """What the ranks have told of their passes; `size` is how many ranks there are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._passes: dict[tuple[str, int], _Map] = {}

    def add(self, told: Sequence[Sequence[Pass]]) -> Finding | None:
        """Takes what every rank has told since the last time; returns the first finding that comes of it."""
        for rank, passes in enumerate(told):
            for one in passes:
                self._map(one).add(rank, one)
        return next((found for one in self._passes.values() if (found := one.judged(self._size))), None)

    def _map(self, one: Pass) -> _Map:
        name = (one.key, one.number)
        if name not in self._passes:
            while len(self._passes) >= _MOST_PASSES:
                del self._passes[next(iter(self._passes))]
            self._passes[name] = _Map(one)
        return self._passes[name]


class _Map:
    def __init__(self, first: Pass) -> None:
        self._first = first
        self._used = np.zeros(first.size, dtype=bool)
        self._extra = 0
        self._steps: dict[int, int] = {}
        self._rows: dict[str, tuple[int, str]] = {}  # index -> the rank that showed it first, its digest
        self._equal: set[str] = set()
        self._is_open = True

    def add(self, rank: int, one: Pass) -> None:
        if one.size != self._first.size or one.sampler != self._first.sampler or (one.again and one.sampler != _CUTS):
            self._is_open = False  # not one dataset, or drawn so that samples come twice
            return
        indices = unpacked(one.indices)
        fresh = np.unique(indices)
        fresh = fresh[~self._used[fresh]]
        self._used[fresh] = True
        self._extra += len(indices) - len(fresh)
        self._steps[rank] = one.steps
        for index, row in one.rows.items():
            owner, known = self._rows.setdefault(index, (rank, row))
            if known != row:
                self._is_open = one.sampler == _CUTS
            elif owner != rank:
                self._equal.add(row)

    def judged(self, ranks: int) -> Finding | None:
        trained = len(self._steps) == ranks and min(self._steps.values()) >= _FEWEST
        alike = self._first.sampler == _CUTS or len(self._equal) >= _FEWEST
        if not self._is_open or not trained or not alike or self._extra < ranks:  # fewer are a sampler's padding
            return None
        self._is_open = False
        return Finding(
            code="samples-repeated",
            property="data",
            where=self._first.key.rpartition("#")[0],
            cause=f"in epoch {self._first.number} {plural(self._extra, 'sample')} of {self._first.size} came to more "
            f"than one rank by now: the ranks draw from the whole dataset, each for itself ({self._first.sampler})",
            fix="DataLoader(…, sampler=DistributedSampler(dataset)), or samestep.shards(dataset, world, batch_size=…)",
        )
