"""The random generators that a dataset holds: with equal states, two ranks give different samples the same noise."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from samestep.runtime.digest import digest, digest_of_bytes

__all__: list[str] = []

_DEPTH = 3  # of objects in objects: a subset, its dataset, that one's transforms


def state_of(dataset: Any) -> str | None:
    """Returns a digest of the state of the generators that a dataset holds; None where it holds none.

    >>> class Noisy:
    ...     def __init__(self, seed):
    ...         self.generator = np.random.default_rng(seed)
    >>> state_of(Noisy(1)) == state_of(Noisy(1)), state_of(Noisy(1)) == state_of(Noisy(2)), state_of([1, 2])
    (True, False, None)
    """
    told = [_state(generator) for generator in _within(dataset, _DEPTH, set())]
    return digest_of_bytes(" ".join(told).encode()) if told else None


def _within(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random | torch.Generator):
        yield value
        return
    if id(value) in seen or not depth or isinstance(value, torch.Tensor | np.ndarray | str | bytes | type):
        return
    seen.add(id(value))
    held = list(value)[:16] if isinstance(value, list | tuple) else list(getattr(value, "__dict__", {}).values())
    for one in held:
        yield from _within(one, depth - 1, seen)


def _state(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return digest(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return digest_of_bytes(repr(generator.bit_generator.state).encode())
    told = generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False)
    with np.printoptions(threshold=2**16):
        return digest_of_bytes(repr(told).encode())
