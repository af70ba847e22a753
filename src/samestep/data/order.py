"""The global order: a keyed permutation of the samples with random access, and its partition into steps and ranks.

The order is a function of (seed, epoch, position) alone, so any rank of any number of ranks can ask for any part of
it. The permutation is a Feistel network over the next power of four, walked along its cycle until it lands below
`size` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002); the round function is SplitMix64's
finaliser (Steele, Lea and Flood, OOPSLA 2014). Memory is constant. It is ours rather than `torch.randperm` because a
resume must find the same order under any version: it never changes; a better one gets a new ORDER_VERSION.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from samestep.seeding import splitmix64
from samestep.topology import cut_evenly

ORDER_VERSION = 1
UNKNOWN = 1 << 62  # the length of a stream that does not say it
ROUNDS = 8
SMALLEST_HALF_BITS = 4  # fewer than 256 slots leave a Feistel network too few permutations to choose from
BLOCK = 1 << 14  # positions computed at a time: large enough to amortise NumPy's calls, small enough to stay in cache

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]


class Order(Protocol):
    """One epoch's order of `size` samples."""

    @property
    def epoch(self) -> int: ...

    @property
    def size(self) -> int: ...

    def take(self, start: int, stop: int) -> Indices:
        """Returns the samples at positions [start, stop), shape [stop - start], int64."""


@dataclass(frozen=True)
class SampleOrder:
    """One epoch's order of `size` samples, shuffled or as they are.

    >>> SampleOrder(size=10, seed=0, epoch=0).take(0, 10).tolist() == sorted(range(10))
    False
    >>> sorted(SampleOrder(size=10, seed=0, epoch=0).take(0, 10).tolist()) == list(range(10))
    True
    """

    size: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    _blocks: dict[int, Indices] = field(default_factory=dict, compare=False, repr=False)

    def take(self, start: int, stop: int) -> Indices:
        """Returns the samples at positions [start, stop), shape [stop - start], int64."""
        assert 0 <= start <= stop <= self.size
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        first = start // BLOCK
        if start < stop <= (first + 1) * BLOCK:  # nearly always
            return self._samples(first)[start - first * BLOCK : stop - first * BLOCK]
        blocks = range(first, -(-stop // BLOCK))
        parts = [self._samples(number)[max(0, start - number * BLOCK) : stop - number * BLOCK] for number in blocks]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _samples(self, number: int) -> Indices:
        """The samples of one block of positions; two are kept, where loading is and where committing is."""
        if number not in self._blocks:
            first = number * BLOCK
            positions = np.arange(first, min(first + BLOCK, self.size), dtype=np.uint64)
            if len(self._blocks) == 2:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = permute(positions, self.size, self._keys)
        return self._blocks[number]

    @cached_property
    def _keys(self) -> Words:
        name = f"samestep order {ORDER_VERSION}/{self.seed}/{self.epoch}/{self.size}"
        digest = hashlib.blake2b(name.encode(), digest_size=8 * ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(positions: Words, size: int, keys: Words) -> Indices:
    """Returns where a keyed bijection of [0, size) sends each of `positions`."""
    half_bits = max(SMALLEST_HALF_BITS, -(-(size - 1).bit_length() // 2))
    words = 1 << 2 * half_bits
    # where few of all words are wanted, walks are long: each step is looked up
    step = _feistel(np.arange(words, dtype=np.uint64), half_bits, keys) if words > 4 * size else None
    result = positions.copy()
    walking = np.arange(len(positions))
    while len(walking):  # a walk ends: its cycle comes back to `position`, which is below `size`
        here = result[walking]
        result[walking] = _feistel(here, half_bits, keys) if step is None else step[here]
        walking = walking[result[walking] >= np.uint64(size)]
    return result.astype(np.int64)


def _feistel(values: Words, half_bits: int, keys: Words) -> Words:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right + key) >> np.uint64(64 - half_bits))
    return (left << bits) | right


@dataclass(frozen=True)
class StepPartition:
    """The positions [start, stop) of one optimizer step, and its partition for one rank."""

    start: int  # first position of the whole step
    stop: int  # one past the last
    # this rank's micro-batches as [start, stop) positions, as many on every rank; empty ones are equal
    micro: tuple[tuple[int, int], ...]
    local_slices: int = 1  # slices of the step that they belong to, one after another: as many micro-batches to each

    @property
    def size(self) -> int:
        return self.stop - self.start

    def slice_of(self, micro: int) -> int:
        return micro * self.local_slices // len(self.micro)


@dataclass(frozen=True)
class StepPartitioner:
    """Divides an order into steps, and these among ranks and micro-batches."""

    total: int  # samples of the epoch
    batch_size: int  # samples of a step, over all ranks
    micro_batch_size: int | None = None  # most samples of one micro-batch on one rank; None takes a rank's share whole
    rank: int = 0  # this rank's position on the data axis; on virtual ranks, its first slice
    ranks: int = 1  # the length of the data axis; on virtual ranks, the slices of a step
    drop_last: bool = False  # leave out a last step shorter than `batch_size`
    local_slices: int = 1  # slices that this rank computes, one after another

    @property
    def end(self) -> int:
        return self.total - self.total % self.batch_size if self.drop_last else self.total

    @property
    def last_has_empty(self) -> bool:
        """Whether the epoch ends with a short step that leaves a rank without samples, as full steps do not."""
        short = self.end % self.batch_size
        return self.end < UNKNOWN and 0 < short < self.ranks <= self.batch_size < self.end

    def steps_from(self, cursor: int) -> int:
        return -(-max(0, self.end - cursor) // self.batch_size)

    def step(self, start: int) -> StepPartition:
        """Returns the step that starts at position `start`.

        The number of micro-batches follows from the largest share, so that it is the same on every rank. Micro-batch
        m of all ranks together is a contiguous part of the step, the one that a single process would take, so that
        what depends on a whole micro-batch (BatchNorm) is the same on any number of ranks.
        """
        stop = min(start + self.batch_size, self.end)
        largest = -(-(stop - start) // self.ranks)
        count = -(-largest // self.micro_batch_size) if self.micro_batch_size else 1
        together = cut_evenly(stop - start, count)  # first for all ranks, then among them
        micro = []
        for rank in range(self.rank, self.rank + self.local_slices):
            for low, high in together:
                first, last = cut_evenly(high - low, self.ranks)[rank]
                micro.append((start + low + first, start + low + last))
        return StepPartition(start, stop, tuple(micro), self.local_slices)
