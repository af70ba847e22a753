"""What a DataLoader's sampler would still order in a pass, read without loading the data. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

__all__: list[str] = []

_MOST = 1 << 22  # samples of a rank's part of a pass


def samplers_of(loader: Any) -> list[Any]:
    """Who draws the order, and the samplers of batches that cut it, one in the other: the loader's own may be idle."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    cutting = []
    while batches is not None:
        cutting.append(batches)
        sampler, batches = getattr(batches, "sampler", sampler), getattr(batches, "batch_sampler", None)
    return [sampler, *cutting]


def numbered(index: Any) -> list[Any] | None:
    """The samples of a batch, or None where they have no number: an iterable dataset's, or (index, size) of crops."""
    plain = index.tolist() if hasattr(index, "tolist") else index
    listed = list(plain) if isinstance(plain, list | tuple) else [plain]
    try:
        return [one if isinstance(one, str) else int(one) for one in listed]
    except (TypeError, ValueError, RuntimeError):
        return None


def rest(loader: Any, noted: list[Any], order: Iterator[Any] | None, yielded: int) -> list[list[Any]] | None:
    """Returns the samples of the batches that a pass would still yield, None where its sampler does not tell.

    An order that goes on beyond the loader's length is endless, or of another length than it says.

    Args:
        loader: the DataLoader.
        noted: what is asked for already, ahead of the script, by workers.
        order: the sampler's iterator behind that; it is read to its end.
        yielded: batches that the pass has yielded.
    """
    from samestep.data.iterable import dataset_length

    length = dataset_length(loader)
    if order is None or length is None or (length - yielded) * (loader.batch_size or 1) > _MOST:
        return None
    with _undrawn(loader):
        batches = [numbered(one) for one in islice(chain(noted, order), length - yielded + 1)]
    told = [one for one in batches if one is not None]
    return told if len(told) == len(batches) == length - yielded else None


@contextmanager
def _undrawn(loader: Any) -> Iterator[None]:
    """Puts all random states back that a sampler may draw from: the default ones, and those that it holds."""
    import numpy as np
    import torch

    back: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),  # noqa: NPY002  (the script may use it)
    ]
    for one in [one for owner in (loader, *samplers_of(loader)) for one in getattr(owner, "__dict__", {}).values()]:
        if isinstance(one, torch.Generator):
            back.append(partial(one.set_state, one.get_state()))
        elif isinstance(one, random.Random):
            back.append(partial(one.setstate, one.getstate()))
        elif isinstance(one, np.random.Generator):
            back.append(partial(setattr, one.bit_generator, "state", one.bit_generator.state))
        elif isinstance(one, np.random.RandomState):
            back.append(partial(one.set_state, one.get_state()))
    try:
        yield
    finally:
        for put_back in back:
            put_back()
