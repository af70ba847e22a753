"""Which samples DataLoaders yield: noted beside them, so that what the script gets is its own iterator.

    yielded ──► a step of an optimizer: trained on ──► told in the next letter
            └─► the end of the pass, or a model set to evaluate: forgotten

Only loaders whose samples should come once an epoch are looked at: see :mod:`samestep.verification.checking.seen`.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, deque
from types import ModuleType
from typing import Any

import numpy as np

from samestep.launch.noting import call_site
from samestep.verification.checking.letters import Pass
from samestep.verification.checking.seen import MOST, packed

__all__: list[str] = []

_OURS = "samestep."  # shards cuts by itself, and keeps a ledger
_SAMPLERS = {"RandomSampler", "SequentialSampler", "SubsetRandomSampler", "DistributedSampler"}
_ROWS = 256  # samples of a dataset whose values are told
_MOST_WAITING = 1 << 16  # samples that no step has used yet: more, and nobody trains on them


class Loaders:
    """The DataLoaders of a process."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()
        self._passes: Counter[str] = Counter()
        self._open: list[_Yielded] = []
        self._is_evaluating = False

    def watch(self, module: ModuleType) -> None:
        """Changes torch.utils.data.dataloader."""
        loader, iterator = module.DataLoader, module._BaseDataLoaderIter  # noqa: SLF001  (indices pass nowhere else)
        loader.__init__ = self._making(loader.__init__)
        loader.__iter__ = self._iterating(loader.__iter__)
        iterator._next_index = _noting(iterator._next_index)  # noqa: SLF001
        iterator.__next__ = self._yielding(iterator.__next__)

    def note_mode(self, *, training: bool) -> None:
        """A model that evaluates does not train on what is yielded now."""
        self._is_evaluating = not training
        if not training:
            self._forget()

    def note_step(self) -> None:
        """What has been yielded since the last step was trained on."""
        for one in self._open:
            one.train()

    def told(self) -> list[Pass]:
        """Returns what was trained on since this was asked last."""
        told = [one.told() for one in self._open if one.trained]
        self._open = [one for one in self._open if not one.is_over]
        return told

    def _forget(self) -> None:
        for one in self._open:
            one.waiting.clear()

    def _making(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(loader, *args, **kwargs)
            frame = sys._getframe(1)  # noqa: SLF001
            if "samestep_key" not in loader.__dict__ and not str(frame.f_globals.get("__name__", "")).startswith(_OURS):
                where = call_site(frame)
                self._made[where] += 1
                loader.samestep_key = f"{where}#{self._made[where]}"

        return __init__

    def _iterating(self, original: Any) -> Any:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Any:  # noqa: N807
            key = loader.__dict__.get("samestep_key")
            if key is None or (sampler := _sampler(loader)) is None:
                return original(loader)
            iterator = loader.__dict__.get("_iterator")  # of workers that stay, and are given work when a pass begins
            if iterator is not None:
                iterator.samestep_ahead = deque()
            iterator = original(loader)
            self._open.append(_Yielded(key, self._passes[key], len(loader.dataset), sampler))
            iterator.samestep_pass = self._open[-1]
            self._passes[key] += 1
            return iterator

        return __iter__

    def _yielding(self, original: Any) -> Any:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:  # noqa: N807
            one = iterator.__dict__.get("samestep_pass")
            try:
                value = original(iterator)
            except BaseException:
                if one is not None:
                    one.end()
                raise
            ahead = iterator.__dict__.get("samestep_ahead")
            indices = ahead.popleft() if ahead else None
            if one is not None and indices is not None and not self._is_evaluating and _has_gradients():
                try:
                    one.add(indices, value)
                except Exception:  # noqa: BLE001  (whatever a batch is: the training is not to blame)
                    self._open = [each for each in self._open if each is not one]
                    iterator.samestep_pass = None
            return value

        return __next__


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def _next_index(iterator: Any) -> Any:
        index = original(iterator)
        iterator.__dict__.setdefault("samestep_ahead", deque()).append(index)
        return index

    return _next_index


def _has_gradients() -> bool:
    import torch

    return torch.is_grad_enabled()


def _sampler(loader: Any) -> str | None:
    """The type of a sampler of torch's own by which every sample should come once, over all ranks."""
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    kind = type(sampler)
    torchs = kind.__module__.startswith("torch.") and (batches is None or type(batches).__name__ == "BatchSampler")
    if not torchs or kind.__name__ not in _SAMPLERS or getattr(sampler, "replacement", False):
        return None
    if getattr(sampler, "num_replicas", _ranks()) != _ranks():  # groups of ranks share samples on purpose
        return None
    return kind.__name__ if hasattr(loader.dataset, "__len__") and 0 < len(loader.dataset) <= MOST else None


def _ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _Yielded:
    """What one pass has yielded."""

    def __init__(self, key: str, number: int, size: int, sampler: str) -> None:
        self._about = (key, number, size, sampler)
        self._every = max(1, size // _ROWS)
        self._rows: dict[str, str] = {}
        self._had: np.ndarray | None = None
        self._again = 0
        self._steps = 0
        self.waiting: list[int] = []
        self.trained: list[int] = []
        self.is_over = False

    def add(self, indices: Any, value: Any) -> None:
        numbers = indices if isinstance(indices, list) else [indices]
        if len(self.waiting) < _MOST_WAITING and all(type(one) is int for one in numbers):
            self.waiting += numbers
            if shown := [place for place, one in enumerate(numbers) if one % self._every == 0]:
                self._show(numbers, shown, value)

    def _show(self, numbers: list[int], shown: list[int], value: Any) -> None:
        from samestep.verification.checking.values import rows

        if (found := rows(value, len(numbers), shown)) is not None:
            self._rows |= {str(numbers[place]): row for place, row in zip(shown, found, strict=True)}

    def train(self) -> None:
        if not self.waiting:
            return
        self._steps += 1
        if self._had is None:
            self._had = np.zeros(self._about[2], dtype=bool)
        fresh = np.unique(self.waiting)
        fresh = fresh[~self._had[fresh]]
        self._again += len(self.waiting) - len(fresh)
        self._had[fresh] = True
        self.trained += self.waiting
        self.waiting = []

    def end(self) -> None:
        self.waiting = []
        self.is_over = True

    def told(self) -> Pass:
        key, number, size, sampler = self._about
        told = Pass(
            key=key,
            number=number,
            size=size,
            sampler=sampler,
            indices=packed(self.trained),
            again=self._again,
            steps=self._steps,
            rows=self._rows,
        )
        self.trained, self._rows = [], {}
        return told
