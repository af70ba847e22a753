"""The samples that ranks train on in a pass: each rank reports them, rank 0 keeps a bitmap.

Nothing is said of a pass unless an index means one sample on all ranks, and every sample should come once: samplers of
torch's own, without replacement, and datasets that have shown the same values for a few indices.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from samestep.instrument.callbacks import LoaderPass
from samestep.text import plural
from samestep.verification.findings import Finding
from samestep.verification.judging.samples import DIVIDE, UNDIVIDED
from samestep.verification.online.exchange import PassSummary

_SAMPLERS = {"RandomSampler", "SequentialSampler", "SubsetRandomSampler", "DistributedSampler"}
_CUTS = "DistributedSampler"
_ROWS = 256  # samples of a dataset whose values are reported
_MAX_WAITING = 1 << 16  # samples that no step has used yet: more, and nobody trains on them
_MAX_SAMPLES = 1 << 25  # of a dataset that is looked at: a byte each on rank 0
_MAX_PASSES = 4  # of which a bitmap is kept
_FEWEST = 2  # steps that make a pass a training; and samples that make two datasets one


def pack(indices: Sequence[int]) -> str:
    return base64.b64encode(np.asarray(indices, dtype="<i8").tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    """Returns the numbers, int64, shape [samples]."""
    return np.frombuffer(base64.b64decode(text), dtype="<i8")


def sampler_of(loader: Any) -> str | None:
    """Returns the type of a sampler of torch's own by which every sample should come once, over all ranks."""
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    kind = type(sampler)
    is_torchs = kind.__module__.startswith("torch.") and (batches is None or type(batches).__name__ == "BatchSampler")
    if not is_torchs or kind.__name__ not in _SAMPLERS or getattr(sampler, "replacement", False):
        return None
    if getattr(sampler, "num_replicas", _ranks()) != _ranks():  # groups of ranks share samples on purpose
        return None
    has_size = hasattr(loader.dataset, "__len__") and 0 < len(loader.dataset) <= _MAX_SAMPLES
    return kind.__name__ if has_size else None


def _ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class TrainedSamples:
    """What one pass of this rank has yielded, and what was trained on."""

    def __init__(self, loader_pass: LoaderPass, sampler: str) -> None:
        size = len(loader_pass.loader.dataset)
        self._about: dict[str, Any] = {
            "key": loader_pass.key,
            "number": loader_pass.number,
            "size": size,
            "sampler": sampler,
        }
        self._every = max(1, size // _ROWS)
        self._rows: dict[str, str] = {}
        self._seen = np.zeros(0, dtype=bool)
        self._size = size
        self._repeated = 0
        self._steps = 0
        self._last = 0  # samples of the last batch
        self.waiting: list[int] = []
        self.trained: list[int] = []
        self.is_over = False

    def add(self, indices: Any, value: Any) -> None:
        numbers = indices if isinstance(indices, list) else [indices]
        self._last = len(numbers)
        if len(self.waiting) < _MAX_WAITING and all(type(one) is int for one in numbers):
            self.waiting += numbers
            shown = [place for place, one in enumerate(numbers) if one % self._every == 0]
            if shown and (found := rows(value, len(numbers), shown)) is not None:
                self._rows |= {str(numbers[place]): row for place, row in zip(shown, found, strict=True)}

    def is_cut_to(self, rows: int, ranks: int) -> bool:
        """Returns whether a model that gets so many rows gets one rank's part of the last batch."""
        return not self.is_over and ranks > 1 and 0 < rows < self._last and rows <= -(-self._last // ranks)

    def train(self) -> None:
        """What has been yielded since the last step was trained on."""
        if not self.waiting:
            return
        self._steps += 1
        if not len(self._seen):
            self._seen = np.zeros(self._size, dtype=bool)
        self._repeated += _mark(self._seen, np.asarray(self.waiting))
        self.trained += self.waiting
        self.waiting = []

    def summary(self) -> PassSummary:
        """Returns what is new since this was asked last."""
        indices, shown = pack(self.trained), self._rows
        self.trained, self._rows = [], {}
        return PassSummary(**self._about, indices=indices, repeated=self._repeated, steps=self._steps, rows=shown)


def _mark(seen: np.ndarray, indices: np.ndarray) -> int:
    """Marks samples as seen; returns how many of them were seen before, or come twice."""
    fresh = np.unique(indices)
    fresh = fresh[~seen[fresh]]
    seen[fresh] = True
    return len(indices) - len(fresh)


def rows(value: Any, size: int, places: Sequence[int]) -> list[str] | None:
    """Returns a digest of each of some samples of a batch on the host; None where it cannot be taken apart."""
    from samestep.verification.recording.rows import row_digests, rowed

    tensors = [one for one in rowed(value) if one.shape[0] == size]
    if not tensors or any(one.device.type != "cpu" for one in tensors):
        return None
    return row_digests([one[list(places)] for one in tensors])


class SampleCoverage:
    """What the ranks have reported of their passes; `size` is how many ranks there are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._passes: dict[tuple[str, int], _Bitmap] = {}

    def add(self, passes: Sequence[Sequence[PassSummary]]) -> Finding | None:
        for rank, reported in enumerate(passes):
            for one in reported:
                self._bitmap(one).add(rank, one)
        return next((found for one in self._passes.values() if (found := one.finding(self._size))), None)

    def _bitmap(self, one: PassSummary) -> _Bitmap:
        name = (one.key, one.number)
        if name not in self._passes:
            while len(self._passes) >= _MAX_PASSES:
                del self._passes[next(iter(self._passes))]
            self._passes[name] = _Bitmap(one)
        return self._passes[name]


class _Bitmap:
    def __init__(self, first: PassSummary) -> None:
        self._first = first
        self._used = np.zeros(first.size, dtype=bool)
        self._extra = 0
        self._steps: dict[int, int] = {}
        self._rows: dict[str, tuple[int, str]] = {}  # index -> the rank that showed it first, its digest
        self._equal: set[str] = set()
        self._is_open = True

    def add(self, rank: int, one: PassSummary) -> None:
        first, is_cut = self._first, one.sampler == _CUTS
        if one.size != first.size or one.sampler != first.sampler or (one.repeated and not is_cut):
            self._is_open = False  # not one dataset, or drawn so that samples come twice
            return
        self._extra += _mark(self._used, unpack(one.indices))
        self._steps[rank] = one.steps
        for index, row in one.rows.items():
            owner, known = self._rows.setdefault(index, (rank, row))
            if known != row:
                self._is_open = is_cut
            elif owner != rank:
                self._equal.add(row)

    def finding(self, ranks: int) -> Finding | None:
        trained = len(self._steps) == ranks and min(self._steps.values()) >= _FEWEST
        is_one = self._first.sampler == _CUTS or len(self._equal) >= _FEWEST
        if not self._is_open or not trained or not is_one or self._extra < ranks:  # fewer are a sampler's padding
            return None
        self._is_open = False
        return Finding(
            code="samples-repeated",
            where=self._first.key.rpartition("#")[0],
            cause=f"in epoch {self._first.number} {plural(self._extra, 'sample')} of {self._first.size} came to more "
            f"than one rank by now: {UNDIVIDED.format(self._first.sampler)}",
            fix=DIVIDE,
        )
