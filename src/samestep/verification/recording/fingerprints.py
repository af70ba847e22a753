"""What a rank's dataset holds: digests of a few samples, loaded once more when the script has ended.

The generators, those that the dataset holds too, are seeded alike for it on all ranks, so that augmentation makes no
difference, and are put back after.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

from samestep.runtime.digest import digest
from samestep.verification.recording.generators import own_generators_seeded
from samestep.verification.recording.rows import leaves

__all__: list[str] = []

_SAMPLES = 5


def fingerprint(dataset: Any) -> dict[str, str]:
    """Returns index -> digest of a few samples; empty for a dataset without an index, or one that refuses.

    And for one whose samples are other ones whenever they are loaded, though generators are seeded.
    """
    try:
        size = len(dataset)
        places = sorted({i * (size - 1) // max(_SAMPLES - 1, 1) for i in range(_SAMPLES)}) if size else []
        told = dict(_samples(dataset, places))
        return told if places and told == dict(_samples(dataset, places)) else {}
    except Exception:  # noqa: BLE001  (the dataset is the script's, and the script is over)
        return {}


def _samples(dataset: Any, places: list[int]) -> Iterator[tuple[str, str]]:
    with _seeded_alike(), own_generators_seeded(dataset):
        for place in places:
            yield str(place), sample_digest(dataset[place])


@contextmanager
def _seeded_alike() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  (the script may use it)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def sample_digest(sample: Any) -> str:
    """Returns what tells one sample of a dataset from another."""
    told = xxhash.xxh3_64()
    for leaf in leaves(sample):
        told.update(_bytes_of(leaf))
    return told.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        return digest(leaf).encode()
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return leaf.tobytes()
    if hasattr(leaf, "tobytes"):  # an image
        return bytes(leaf.tobytes())
    return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float | bool | None) else b""
