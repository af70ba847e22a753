"""Random numbers of fake GPUs: generators whose state is that of CUDA's, a seed and an offset.

Each operator that draws takes its numbers from a CPU generator that is seeded with both, and moves the offset on. So a
state is 16 bytes as on a GPU, and what shifts offsets (DTensor, checkpointing) works. The numbers are not a GPU's.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

DEFAULT_SEED = 67280421310721  # torch's own
STEP = 4  # what an operator moves the offset by: CUDA's moves in steps of four numbers, too
BASE = torch.Generator  # the class of C++, also while another has its name
_thread = threading.local()
_made: weakref.WeakValueDictionary[int, FakeGenerator] = weakref.WeakValueDictionary()
_default: list[FakeGenerator] = []


class FakeGenerator(BASE):
    """A generator of a fake GPU.

    For C++ it is a CPU generator, from which no operator draws. C++ does not keep the Python object, so the seed of
    that generator is a mark by which the object is found again.
    """

    _index: int
    _seed: int
    _offset: int

    def __new__(cls, index: int = 0) -> Self:
        made = super().__new__(cls)
        made._index, made._seed, made._offset = index, DEFAULT_SEED, 0
        mark = secrets.randbits(63)
        BASE.manual_seed(made, mark)
        _made[mark] = made
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._index)

    def manual_seed(self, seed: int) -> FakeGenerator:
        self._seed, self._offset = seed % 2**64, 0
        return self

    def seed(self) -> int:
        """Begins a stream at random; returns its seed."""
        self.manual_seed(secrets.randbits(63))
        return self._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> FakeGenerator:
        if offset % STEP:
            raise RuntimeError("offset must be a multiple of 4")
        self._offset = offset
        return self

    def get_state(self) -> torch.Tensor:
        """Returns seed and offset, [16] uint8 in host memory."""
        words = [word - 2**64 if word >= 2**63 else word for word in (self._seed, self._offset)]
        return torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> FakeGenerator:
        if state.device.type != "cpu" or state.dtype is not torch.uint8:
            raise TypeError(f"expected a torch.ByteTensor, but got {state.type()}")
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        seed, offset = state.clone().view(torch.int64).tolist()
        self._seed, self._offset = seed % 2**64, offset % 2**64
        return self

    graphsafe_get_state = get_state  # type: ignore[assignment]
    graphsafe_set_state = set_state  # type: ignore[assignment]

    def clone_state(self) -> FakeGenerator:
        return FakeGenerator(self._index).set_state(self.get_state())

    def next_seed(self) -> int:
        """Returns the seed of the next operator's numbers, and moves on."""
        mixed = (self._seed * 0x9E3779B97F4A7C15 + (self._offset + 1) * 0xBF58476D1CE4E5B9) % 2**64
        self._offset += STEP
        return (mixed ^ mixed >> 31) % 2**63


def make_generators(count: int) -> tuple[FakeGenerator, ...]:
    """Makes the default generators of so many GPUs, seeded at random: no two processes draw the same numbers."""
    _default[:] = [FakeGenerator(index) for index in range(count)]
    for generator in _default:
        generator.seed()
    return tuple(_default)


def draw_from(given: Any, index: int) -> torch.Generator:
    """Returns the CPU generator from which one operator on GPU `index` draws."""
    own = _default[index] if given is None else _made.get(BASE.initial_seed(given))
    if own is None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    scratch = getattr(_thread, "generator", None)
    if scratch is None:
        scratch = _thread.generator = BASE("cpu")
    return scratch.manual_seed(own.next_seed())


@contextmanager
def borrowed(index: int) -> Iterator[None]:
    """Lets an operator that takes no generator draw from GPU `index`'s, not from the CPU's."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(_default[index].next_seed())
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
