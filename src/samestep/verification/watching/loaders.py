"""Tells of DataLoaders: which samples each pass yields, also where workers load them.

A loader is named by the line that made it and its number among those made there. So the same loader bears the same
name on every rank, and in a process of its own, though rank 0 may have one more.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from samestep.launch.noting import call_site
from samestep.verification.watching.listener import Batch, Callbacks, Epoch, Own
from samestep.verification.watching.orders import numbered, rest

__all__: list[str] = []

_OURS = "samestep.data."  # shards' own loader is watched by what shards tell


class Loaders:
    """The DataLoaders of a process."""

    def __init__(self, listener: Callbacks) -> None:
        self._listener = listener
        self._made: Counter[str] = Counter()
        self._passes: Counter[str] = Counter()

    def watch(self, module: ModuleType) -> None:
        """Changes torch.utils.data.dataloader."""
        loader, iterator = module.DataLoader, module._BaseDataLoaderIter  # noqa: SLF001  (indices pass nowhere else)
        loader.__init__ = self._making(loader.__init__)
        loader.__iter__ = self._iterating(loader.__iter__)
        loader.__len__ = self._measuring(loader.__len__)
        iterator._next_index = _noting_indices(iterator._next_index)  # noqa: SLF001

    def _making(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            frame = sys._getframe(1)  # noqa: SLF001
            if not hasattr(loader, "samestep_key"):
                loader.samestep_key = None if _is_ours(frame) else self._key(call_site(frame))
            original(loader, *args, **kwargs)
            if loader.num_workers and loader.samestep_key is not None and loader.multiprocessing_context is None:
                loader.worker_init_fn = _WorkerBegun(self._listener, loader.samestep_key, loader.worker_init_fn)

        return __init__

    def _key(self, where: str) -> str:
        self._made[where] += 1
        return f"{where}#{self._made[where]}"

    def _iterating(self, original: Any) -> Any:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807
            key = getattr(loader, "samestep_key", None)
            if key is None:
                return original(loader)  # type: ignore[no-any-return]
            epoch = Epoch(loader, key, self._passes[key], call_site(sys._getframe(1)))  # noqa: SLF001
            self._passes[key] += 1
            return self._listener.batches(epoch, _OwnBatches(original, epoch))

        return __iter__

    def _measuring(self, original: Any) -> Any:
        @functools.wraps(original)
        def __len__(loader: Any) -> int:  # noqa: N807
            own: int = original(loader)
            key = getattr(loader, "samestep_key", None)
            return own if key is None else self._listener.length(loader, key, own)

        return __len__


class _WorkerBegun:
    """In a worker: its generators when it begins, and whether they were used when it ends.

    A worker that is not forked has no journal: there, the script's own function alone comes out of its pickle.
    """

    def __init__(self, listener: Callbacks, key: str, own: Any) -> None:
        self._listener, self._key, self._own = listener, key, own

    def __call__(self, worker: int) -> None:
        from multiprocessing.util import Finalize

        if self._own is not None:
            self._own(worker)
        before = generator_states()
        Finalize(None, _worker_ended, args=(self._listener, self._key, worker, before), exitpriority=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._own,)


def _same(own: Any) -> Any:
    return own


def _worker_ended(listener: Callbacks, key: str, worker: int, before: dict[str, str]) -> None:
    used = [name for name, state in generator_states().items() if state != before[name]]
    listener.told("worker", key=key, worker=worker, states=before, used=used)


def generator_states() -> dict[str, str]:
    """Returns digests of what the default generators will draw from."""
    import random

    import numpy as np
    import torch

    from samestep.runtime.digest import digest, digest_of_bytes

    return {
        "random": digest_of_bytes(repr(random.getstate()).encode()),
        "numpy": digest_of_bytes(repr(np.random.get_state()).encode()),  # noqa: NPY002  (the script may use it)
        "torch": digest(torch.get_rng_state()),
    }


class _OwnBatches(Own):
    """What a DataLoader yields in a pass; nothing of it is begun before the first batch is asked for."""

    def __init__(self, original: Any, epoch: Epoch) -> None:
        self._original = original
        self._epoch = epoch
        self._iterator: Any = None
        self._noted: deque[Any] = deque()
        self._yielded = 0

    def __next__(self) -> Batch:
        if self._iterator is None:
            if (kept := self._epoch.loader.__dict__.get("_iterator")) is not None:  # of workers that stay: nothing of
                kept.samestep_indices = deque()  # the last pass
            self._iterator = self._original(self._epoch.loader)
            self._noted = self._iterator.__dict__.setdefault("samestep_indices", self._noted)  # workers load at once
        value = next(self._iterator)
        indices = numbered(self._noted.popleft()) if self._noted else None
        self._yielded += 1
        return Batch(self._epoch, self._yielded - 1, indices, value)

    def rest(self) -> list[list[Any]] | None:
        order = getattr(self._iterator, "_sampler_iter", None)
        return rest(self._epoch.loader, list(self._noted), order, self._yielded)


def _noting_indices(original: Any) -> Any:
    @functools.wraps(original)
    def _next_index(iterator: Any) -> Any:
        index = original(iterator)
        iterator.__dict__.setdefault("samestep_indices", deque()).append(index)
        return index

    return _next_index


def _is_ours(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_OURS)
