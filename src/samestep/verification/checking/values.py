"""Digests of parameters and gradients for a letter: at most so many bytes each time, the same tensors on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from torch import Tensor

from samestep.runtime.digest import bytes_of, digest_of_bytes
from samestep.verification.journal import place_of
from samestep.verification.recording.optimizers import digests
from samestep.verification.recording.rows import rowed

__all__: list[str] = []

AT_FIRST = 32 << 20  # bytes of parameters in the first letter, and of gradients as many
LATER = 8 << 20  # in the others: a larger model is looked at in turns

Digests = dict[str, str | None]


def turn_of(parameters: Mapping[str, Tensor], letter: int) -> list[str]:
    """Returns the names whose turn it is: one group after another, each as large as a letter may look at."""
    groups: list[list[str]] = [[]]
    size = 0
    most = LATER if letter else AT_FIRST
    for name, parameter in parameters.items():
        count = parameter.numel() * parameter.element_size()  # of a cut one the whole, which all ranks agree on
        if size + count > most and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += count
    return groups[letter % len(groups)]


def of(parameters: Mapping[str, Tensor]) -> tuple[Digests, Digests]:
    """Returns the digests of parameters, and of their gradients."""
    return digests(parameters), digests({name: parameter.grad for name, parameter in parameters.items()})


def one_of(told: Digests) -> str:
    """Returns one digest for all."""
    return digest_of_bytes(repr(list(told.items())).encode())


def layout_of(told: Digests) -> str:
    """Returns what is equal where two ranks hold the same parts of the same tensors."""
    return digest_of_bytes(repr([(name, place_of(value)) for name, value in told.items()]).encode())


def rows(value: Any, size: int, places: Sequence[int]) -> list[str] | None:
    """Returns a digest of each of some samples of a batch on the host; None where it cannot be taken apart."""
    tensors = [one for one in rowed(value) if one.shape[0] == size]
    if not tensors or any(one.device.type != "cpu" for one in tensors):
        return None
    return [_row([tensor[place] for tensor in tensors]) for place in places]


def _row(tensors: Sequence[Tensor]) -> str:
    told = xxhash.xxh3_64()
    for tensor in tensors:
        told.update(bytes_of(tensor).numpy().data)
    return told.hexdigest()
