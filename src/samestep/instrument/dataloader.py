"""Reports DataLoaders: which samples each pass yields, also where workers load them, and where datasets were made.

A loader is named by the line that made it and its number among those made there. So the same loader has the same name
on every rank, and in a process of its own, though rank 0 may have one more.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from samestep.instrument.callbacks import LoadedBatch, LoaderPass, PassIterator, call, listeners
from samestep.instrument.patch import Group, call_site, caller, on_undo, patch, user_line

batches = Group()  # reports that a batch is loaded, and which
passes = Group(batches)  # passes over loaders, with the indices of each batch, and the generators of workers
datasets = Group()  # notes the line at which every dataset and sampler of torch's own kinds is made

_OURS = "samestep.data."  # shards' own loader is known by what shards reports
_MOST = 1 << 22  # samples of a rank's part of a pass
_LOADER = "torch.utils.data.dataloader"
_made: Counter[str] = Counter()  # line -> loaders made there
_passes: Counter[str] = Counter()  # loader -> passes over it
_lines: dict[int, tuple[weakref.ref[Any], str]] = {}  # of datasets and samplers


# --- passes ----------------------------------------------------------------------------------


@batches.patch(_LOADER, "_BaseDataLoaderIter.__next__", compiled=True)
def _next(original: Any, iterator: Any) -> Any:
    known = iterator.__dict__.get("samestep_pass")
    entered = [(one, one.on_enter_batch()) for one in listeners("on_enter_batch")]
    try:
        value = original(iterator)
    except BaseException:
        if known is not None:
            call("on_pass_end", known)
        raise
    finally:
        for one, what in entered:
            one.on_exit_batch(what)
    indices = None
    if known is not None:
        requested = iterator.samestep_indices
        indices = iterator.samestep_batch = requested.popleft() if requested else None
    call("on_batch", known, indices, value)
    return value


@passes.on_import(_LOADER)
def _forget_loaders(_: object) -> None:
    on_undo(_made.clear)
    on_undo(_passes.clear)


@passes.patch(_LOADER, "DataLoader.__init__")
def _make_loader(original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    if not hasattr(loader, "samestep_key"):
        frame = caller()
        is_ours = str(frame.f_globals.get("__name__", "")).startswith(_OURS)
        loader.samestep_key = None if is_ours else _key(call_site(frame))
    original(loader, *args, **kwargs)
    is_forking = loader.num_workers and loader.multiprocessing_context is None
    if is_forking and listeners("on_worker") and loader.samestep_key is not None:
        loader.worker_init_fn = _WorkerInit(loader.samestep_key, loader.worker_init_fn)


def _key(where: str) -> str:
    _made[where] += 1
    return f"{where}#{_made[where]}"


@passes.patch(_LOADER, "DataLoader.__iter__")
def _iterate(original: Any, loader: Any) -> Iterator[Any]:
    key = getattr(loader, "samestep_key", None)
    if key is None:
        return original(loader)  # type: ignore[no-any-return]
    loader_pass = LoaderPass(loader, key, _passes[key], user_line())
    _passes[key] += 1
    own = _OwnBatches(original, loader_pass)
    given = (one.on_pass(loader_pass, own) for one in listeners("on_pass"))
    replaced = next((one for one in given if one is not None), None)
    return own.begin() if replaced is None else replaced


@passes.patch(_LOADER, "DataLoader.__len__")
def _length(original: Any, loader: Any) -> int:
    length: int = original(loader)
    if (key := getattr(loader, "samestep_key", None)) is not None:
        for one in listeners("on_length"):
            length = one.on_length(loader, key, length)
    return length


@passes.patch(_LOADER, "_BaseDataLoaderIter._next_index")  # indices pass nowhere else
def _next_index(original: Any, iterator: Any) -> Any:
    index = original(iterator)
    iterator.__dict__.setdefault("samestep_indices", deque()).append(index)
    return index


class _OwnBatches(PassIterator):
    """What a DataLoader yields in a pass; nothing of it begins before the first batch is asked for."""

    def __init__(self, original: Any, loader_pass: LoaderPass) -> None:
        self._original = original
        self._pass = loader_pass
        self._iterator: Any = None
        self._yielded = 0

    def begin(self) -> Any:
        if (kept := self._pass.loader.__dict__.get("_iterator")) is not None:  # of workers that stay: nothing of
            kept.samestep_indices = deque()  # the last pass
        iterator = self._iterator = self._original(self._pass.loader)
        iterator.__dict__.setdefault("samestep_indices", deque())  # workers load at once
        iterator.samestep_pass = self._pass
        return iterator

    def __next__(self) -> LoadedBatch:
        iterator = self.begin() if self._iterator is None else self._iterator
        value = next(iterator)
        self._yielded += 1
        sampled = iterator.__dict__.get("samestep_batch")
        indices = None if sampled is None else numbered(sampled)
        return LoadedBatch(self._pass, self._yielded - 1, indices, value)

    def rest(self, length: int | None) -> list[list[Any]] | None:
        requested = list(self._iterator.samestep_indices) if self._iterator is not None else []
        order = getattr(self._iterator, "_sampler_iter", None)
        return rest(self._pass.loader, length, requested, order, self._yielded)


class _WorkerInit:
    """In a worker: its generators when it begins, and whether they were used when it ends.

    A worker that is not forked has no subscribers: there, the script's own function alone comes out of its pickle.
    """

    def __init__(self, key: str, own: Any) -> None:
        self._key, self._own = key, own

    def __call__(self, worker: int) -> None:
        from multiprocessing.util import Finalize

        if self._own is not None:
            self._own(worker)
        Finalize(None, _worker_ended, args=(self._key, worker, generator_states()), exitpriority=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._own,)


def _same(own: Any) -> Any:
    return own


def _worker_ended(key: str, worker: int, before: dict[str, bytes]) -> None:
    used = [name for name, state in generator_states().items() if state != before[name]]
    call("on_worker", key, worker, before, used)


def generator_states() -> dict[str, bytes]:
    import numpy as np
    import torch

    return {
        "random": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()).encode(),  # noqa: NPY002  (the script may use it)
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


# --- orders that are read without the data ---------------------------------------------------


def samplers_of(loader: Any) -> list[Any]:
    """Returns who draws the order, and the samplers of batches that cut it, one in the other: the own may be idle."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    cutting = []
    while batches is not None:
        cutting.append(batches)
        sampler, batches = getattr(batches, "sampler", sampler), getattr(batches, "batch_sampler", None)
    return [sampler, *cutting]


def numbered(index: Any) -> list[Any] | None:
    """Returns the samples of what a sampler gives for a batch; None where they have no number.

    Those of an iterable dataset have none, nor has (index, size) of crops.
    """
    plain = index.tolist() if hasattr(index, "tolist") else index
    listed = list(plain) if isinstance(plain, list | tuple) else [plain]
    try:
        return [one if isinstance(one, str) else int(one) for one in listed]
    except (TypeError, ValueError, RuntimeError):
        return None


def rest(
    loader: Any, length: int | None, requested: list[Any], order: Iterator[Any] | None, yielded: int
) -> list[list[Any]] | None:
    """Returns the samples of the batches that a pass would still yield, None where its sampler does not tell.

    An order that goes on beyond the loader's length is endless, or of another length than it says. `requested` is what
    workers ask for already, ahead of the script; `order` is the sampler's iterator behind that, read to its end.
    """
    if order is None or length is None or (length - yielded) * (loader.batch_size or 1) > _MOST:
        return None
    with _generators_kept(loader):
        found = [numbered(one) for one in islice(chain(requested, order), length - yielded + 1)]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) == length - yielded else None


@contextmanager
def _generators_kept(loader: Any) -> Iterator[None]:
    """Restores all random states that a sampler may draw from: the default ones, and those that it holds."""
    import numpy as np
    import torch

    held = [one for owner in (loader, *samplers_of(loader)) for one in getattr(owner, "__dict__", {}).values()]
    before = [(one, generator_state(one)) for one in (torch.default_generator, *filter(is_generator, held))]
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (the script may use it)
    try:
        yield
    finally:
        for one, state in before:
            restore_generator(one, state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def is_generator(value: Any) -> bool:
    import numpy as np
    import torch

    return isinstance(value, np.random.Generator | np.random.RandomState | random.Random | torch.Generator)


def generator_state(generator: Any) -> Any:
    if hasattr(generator, "bit_generator"):  # of NumPy
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def restore_generator(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


# --- datasets --------------------------------------------------------------------------------


@datasets.on_import("torch.utils.data.dataset")
def _patch_datasets(module: Any) -> None:
    for kind in [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, module.Dataset)]:
        if "__init__" in vars(kind):
            patch(kind, "__init__")(_make)


@datasets.on_import("torch.utils.data.distributed")
def _patch_samplers(module: Any) -> None:
    patch(module.DistributedSampler, "__init__")(_make)


def _make(original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
    original(made, *args, **kwargs)
    if type(made).__module__.startswith("torch."):
        _lines[id(made)] = weakref.ref(made), user_line()


def made_at(one: Any) -> str | None:
    """Returns "file:line" of where a dataset or sampler was made, None where its line is not noted."""
    reference, where = _lines.get(id(one), (None, None))
    return where if reference is not None and reference() is one else None
