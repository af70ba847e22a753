"""What of a replica is compared with the others, and 64 bits that stand for all of it.

    0.weight   0.bias   …   running_mean   …   exp_avg of 0.weight in AdamW   …   lr of AdamW's group 0
       │         │               │                      │                            │
      XXH3      XXH3            XXH3                   XXH3                         XXH3        on the host
       └─────────┴───────────────┴──────────────────────┴────────────────────────────┘
                                 XXH3 of all, with names, types and shapes

`torch.hash_tensor` is an XOR: it cannot see that two elements were exchanged, and [1, 1, 3] and [2, 2, 3] are one to it
(measured on torch 2.13). A sum of the words is as blind. XXH3 (https://xxhash.com) sees every position at the speed of
memory: the 20 MB of `samestep bench guard` in 1.6 ms on a busy core.

On another device the weights stay there; what is summed is each 64-bit word, mixed with its place [1]:

    mixed(x) = Σ fmix64(x_i XOR i·φ)  mod 2^64        φ = 0x9E3779B97F4A7C15, odd, so no two places are alike

fmix64 is the finaliser of MurmurHash3 (A. Appleby, 2011), a bijection, so a change of one word is always seen; of
more, chance hides one in 2^64. All in torch's own operations on int64, which wrap; a shift to the right copies the sign
there, and the copies are masked off, since otherwise x and NOT x would be one [2].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from samestep.replicas.differing import NUMBER
from samestep.replicas.norm import SyncBatchNorm
from samestep.runtime.digest import bytes_of, short_digest
from samestep.seeding import GOLDEN

__all__: list[str] = []

CHUNK = 32 << 20  # bytes that are mixed at a time on a device, in as many bytes of its memory again, twice
_WORD = 8  # bytes
_MASK = (1 << 64) - 1


def signed(word: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


_PHI = signed(GOLDEN)
_FMIX64 = (signed(0xFF51AFD7ED558CCD), signed(0xC4CEB9FE1A85EC53))


@dataclass(frozen=True, eq=False)
class Item:
    """Something that must be alike on all ranks: a tensor, or a number of an optimizer.

    Attributes:
        name: the same on every rank.
        value: a tensor, a number or a tuple of numbers.
        home: the dict or list in which a number stands.
        key: under which it does.
    """

    name: str
    value: Any
    home: Any = None
    key: Any = None

    @property
    def kind(self) -> str:
        """What another rank must have to take it over."""
        if not isinstance(self.value, Tensor):
            return NUMBER
        return f"{str(self.value.dtype).removeprefix('torch.')} {list(self.value.shape)}"

    @property
    def stays(self) -> bool:
        """Whether it lies on a device that computes its digest itself."""
        return isinstance(self.value, Tensor) and _stays(self.value)

    def digest(self) -> int:
        """Returns 64 bits of its value, type and shape."""
        if not isinstance(self.value, Tensor):
            return xxhash.xxh3_64_intdigest(repr(self.value).encode())
        if self.stays:
            return xxhash.xxh3_64_intdigest(f"{self.kind} {int(mixed([self.value]))}".encode())
        return short_digest(self.value)


def _stays(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def items_of_model(module: nn.Module, *, buffers: bool) -> Iterator[Item]:
    """Yields what of a model is alike on all ranks: its parameters, and its buffers unless they are left out.

    The running statistics of a normalisation that is not synchronised are each rank's own.
    """
    for name, parameter in module.named_parameters():
        yield Item(name, parameter)
    own = _own_statistics(module) if buffers else set()
    for name, buffer in module.named_buffers() if buffers else ():
        if name not in own:
            yield Item(name, buffer)


def _own_statistics(module: nn.Module) -> set[str]:
    return {
        name
        for prefix, layer in module.named_modules()
        if isinstance(layer, _NormBase) and not isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))
        for name, _ in layer.named_buffers(prefix, recurse=False)
    }


def items_of_optimizer(optimizer: Optimizer, names: Mapping[int, str], place: int) -> Iterator[Item]:
    """Yields an optimizer's state of a model's parameters, and the numbers of their groups.

    Args:
        optimizer: which may hold parameters of other models, too.
        names: of the model's parameters, by their identity.
        place: among the model's optimizers.
    """
    label = f"{type(optimizer).__name__}{f' {place + 1}' if place else ''}"
    for number, group in enumerate(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in names]
        for parameter in own:
            state = optimizer.state.get(parameter, {})
            for key in state:
                yield from _items_in(f"{key} of {names[id(parameter)]} in {label}", state, key)
        for key in group if own else ():
            if key != "params":
                yield from _items_in(f"{key} of {label}'s group {number}", group, key)


def _items_in(name: str, home: Any, key: Any) -> Iterator[Item]:
    value = home[key]
    if isinstance(value, Tensor) or _is_number(value):
        yield Item(name, value, home, key)
    elif isinstance(value, tuple) and value and all(map(_is_number, value)):
        yield Item(name, value, home, key)  # Adam's betas
    elif isinstance(value, (list, dict)):  # what LBFGS remembers
        for inner in range(len(value)) if isinstance(value, list) else value:
            yield from _items_in(f"{inner} in {name}", value, inner)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def digest_of_all(items: Sequence[Item], salt: str) -> int:
    """Returns 64 bits, signed, of all items, their names and `salt`; read from each other device once."""
    told = xxhash.xxh3_64(salt.encode())
    for item in items:
        told.update(f"{item.name} {item.kind}".encode() if item.stays else item.name.encode())
        if not item.stays:
            told.update(item.digest().to_bytes(_WORD, "little"))
    remote = sorted((item.value for item in items if item.stays), key=lambda tensor: str(tensor.device))
    for _, tensors in groupby(remote, key=lambda tensor: str(tensor.device)):
        told.update((int(mixed(list(tensors))) & _MASK).to_bytes(_WORD, "little"))
    return signed(told.intdigest())


def mixed(tensors: Sequence[Tensor], chunk: int = CHUNK) -> Tensor:
    """Returns 64 bits of the tensors' bytes and their places [1], of shape [] on their device.

    Args:
        tensors: on one device.
        chunk: bytes that are mixed at a time, a multiple of 8; the answer does not depend on it.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    first = 0
    for pieces in _pieces(tensors, chunk):
        words = _words(pieces)
        places = torch.arange(first, first + len(words), device=words.device)
        total += _fmix64(words.bitwise_xor_(places.mul_(_PHI))).sum()
        first += len(words)
    return total


def _pieces(tensors: Sequence[Tensor], chunk: int) -> Iterator[list[Tensor]]:
    """Yields the bytes of all tensors, one behind another, `chunk` at a time: few launches for many small ones."""
    held: list[Tensor] = []
    room = chunk
    for tensor in tensors:
        data = bytes_of(tensor)
        while len(data):
            held.append(data[:room])
            data = data[room:]
            room -= len(held[-1])
            if not room:
                yield held
                held, room = [], chunk
    if held:
        yield held


def _words(pieces: list[Tensor]) -> Tensor:
    data = torch.cat(pieces)  # a copy, to be changed in place
    return nn.functional.pad(data, (0, -len(data) % _WORD)).view(torch.int64)


def _fmix64(words: Tensor) -> Tensor:
    for factor in _FMIX64:
        _fold(words).mul_(factor)
    return _fold(words)


def _fold(words: Tensor) -> Tensor:
    return words.bitwise_xor_((words >> 33).bitwise_and_((1 << 31) - 1))  # [2]
