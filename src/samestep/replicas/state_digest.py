"""What of a replica is compared with the others, its 64-bit digest, and which ranks differ.

On the host the digest is XXH3 of every tensor with its name, type and shape (see `runtime.digest`). On another device
the tensors stay there; what is summed is each 64-bit word, mixed with its position:

    device_hash(x) = sum of fmix64(x_i XOR i * phi) mod 2^64      phi = 0x9E3779B97F4A7C15, odd: no two positions agree

fmix64 is the finaliser of MurmurHash3 (A. Appleby, 2011), a bijection, so a change of one word is always seen; of
more, chance hides one in 2^64. All in torch's own operations on int64, which wrap; a shift to the right copies the sign
there, and the copies are masked off, since otherwise x and NOT x would have the same digest.

More than half of the ranks are taken to be right, tensor by tensor. The version that a repair would send to all is
theirs, otherwise that of the lowest rank among those that agree with most. An optimizer's numbers come first: one
rank's own learning rate explains all the tensors behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.replicas.batchnorm import running_statistics
from samestep.runtime.digest import bytes_of, short_digest
from samestep.seeding import GOLDEN
from samestep.text import join_and

CHUNK = 32 << 20  # bytes that are mixed at a time on a device, in as many bytes of its memory again, twice
_WORD = 8  # bytes
_MASK = (1 << 64) - 1


def signed(word: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


_PHI = signed(GOLDEN)
_FMIX64 = (signed(0xFF51AFD7ED558CCD), signed(0xC4CEB9FE1A85EC53))


@dataclass(frozen=True, eq=False)
class StateItem:
    """Something that must be alike on all ranks: a tensor, or a number of an optimizer."""

    name: str  # the same on every rank
    value: Any  # a tensor, a number or a tuple of numbers
    home: Any = None  # the dict or list in which a number stands
    key: Any = None  # under which it does

    @property
    def kind(self) -> str:
        """What another rank must have to take it over."""
        if not isinstance(self.value, Tensor):
            return NUMBER
        return f"{str(self.value.dtype).removeprefix('torch.')} {list(self.value.shape)}"

    @property
    def on_device(self) -> bool:
        """Whether it lies on a device that computes its digest itself."""
        return isinstance(self.value, Tensor) and _on_device(self.value)

    def digest(self) -> int:
        if not isinstance(self.value, Tensor):
            return xxhash.xxh3_64_intdigest(repr(self.value).encode())
        if self.on_device:
            return xxhash.xxh3_64_intdigest(f"{self.kind} {int(device_hash([self.value]))}".encode())
        return short_digest(self.value)


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def items_of_model(module: nn.Module, *, buffers: bool) -> Iterator[StateItem]:
    """Yields what of a model is alike on all ranks: its parameters, and its buffers unless they are left out.

    The running statistics of a normalisation that is not synchronised are each rank's own.
    """
    for name, parameter in module.named_parameters():
        yield StateItem(name, parameter)
    own = running_statistics(module, own=True) if buffers else set()
    for name, buffer in module.named_buffers() if buffers else ():
        if name not in own:
            yield StateItem(name, buffer)


def items_of_optimizer(optimizer: Optimizer, names: Mapping[int, str], place: int) -> Iterator[StateItem]:
    """Yields an optimizer's state of a model's parameters, and the numbers of their groups."""
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


def _items_in(name: str, home: Any, key: Any) -> Iterator[StateItem]:
    value = home[key]
    if isinstance(value, Tensor) or _is_number(value):
        yield StateItem(name, value, home, key)
    elif isinstance(value, tuple) and value and all(map(_is_number, value)):
        yield StateItem(name, value, home, key)  # Adam's betas
    elif isinstance(value, (list, dict)):  # what LBFGS remembers
        for inner in range(len(value)) if isinstance(value, list) else value:
            yield from _items_in(f"{inner} in {name}", value, inner)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def digest_of_all(items: Sequence[StateItem], salt: str) -> int:
    """Returns 64 bits, signed, of all items, their names and `salt`; read from each other device once."""
    state = xxhash.xxh3_64(salt.encode())
    for item in items:
        state.update(f"{item.name} {item.kind}".encode() if item.on_device else item.name.encode())
        if not item.on_device:
            state.update(item.digest().to_bytes(_WORD, "little"))
    remote = sorted((item.value for item in items if item.on_device), key=lambda tensor: str(tensor.device))
    for _, tensors in groupby(remote, key=lambda tensor: str(tensor.device)):
        state.update((int(device_hash(list(tensors))) & _MASK).to_bytes(_WORD, "little"))
    return signed(state.intdigest())


def device_hash(tensors: Sequence[Tensor], chunk: int = CHUNK) -> Tensor:
    """Returns 64 bits of the tensors' bytes and their places [1], of shape [] on their device."""
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


NUMBER = "number"  # the kind of an optimizer's numbers
MOST_NAMES = 3  # of tensors, in a sentence
MOST_PARTIES = 4  # ranks or sets of ranks that differ, likewise
_MAX_NAME = 200  # of a name

RankDigests = Mapping[str, Sequence[Any]]  # by name: digest, and what kind of value it is


@dataclass(frozen=True)
class Difference:
    name: str  # of the tensor or number
    source: int  # the position of the rank whose version a repair sends to all
    others: tuple[int, ...]  # the positions of those that hold another version than it
    is_decided: bool  # whether most ranks hold the source's version
    can_be_sent: bool  # whether all ranks have it, of one type and shape
    is_number: bool = False  # whether it is an optimizer's number, and no tensor


def differences(digests: Sequence[RankDigests]) -> list[Difference]:
    return sorted(_differences(digests), key=lambda one: not one.is_number)


def _differences(digests: Sequence[RankDigests]) -> Iterator[Difference]:
    for name in dict.fromkeys(name for one in digests for name in one):
        versions = [tuple(one[name]) if name in one else None for one in digests]
        holders: dict[tuple[Any, ...] | None, list[int]] = {}
        for position, version in enumerate(versions):
            holders.setdefault(version, []).append(position)
        if len(holders) > 1:
            right = max(holders.values(), key=len)  # of several as many, that with the lowest rank
            others = tuple(position for position in range(len(digests)) if position not in right)
            kinds = {None if version is None else version[1] for version in versions}
            is_decided = 2 * len(right) > len(digests)
            can_be_sent = len(kinds) == 1 and None not in kinds
            yield Difference(name, right[0], others, is_decided, can_be_sent, is_number=NUMBER in kinds)


def minority_ranks(found: Sequence[Difference]) -> tuple[int, ...]:
    """Returns the positions of the ranks that differ from most; empty where nobody can tell."""
    return tuple(sorted({position for one in found if one.is_decided for position in one.others}))


def describe(found: Sequence[Difference], ranks: Sequence[int]) -> str:
    """Returns a sentence on who differs in what."""
    parties: dict[tuple[int, ...] | None, list[str]] = {}
    for one in found:
        parties.setdefault(one.others if one.is_decided else None, []).append(one.name)
    parts = [_describe_party(others, names, ranks) for others, names in parties.items()]
    rest = (
        [f"{len(parts) - MOST_PARTIES} more sets of ranks differ in other tensors"] if len(parts) > MOST_PARTIES else []
    )
    return "; ".join(parts[:MOST_PARTIES] + rest)


def _describe_party(others: tuple[int, ...] | None, names: Sequence[str], ranks: Sequence[int]) -> str:
    what = first_of(names)
    if others is not None:
        verb = "differs" if len(others) == 1 else "differ"
        return f"{ranks_named([ranks[position] for position in others])} {verb} from the others in {what}"
    if len(ranks) == 2:
        return f"{ranks_named(ranks)} differ in {what}, and of two nobody can tell which is right"
    return f"{ranks_named(ranks)} differ in {what}, no version is on most, and nobody can tell which is right"


def first_of(names: Sequence[str]) -> str:
    """Returns the first few names, and how many more there are."""
    shown = [name[:_MAX_NAME] for name in names[:MOST_NAMES]]
    if len(names) > MOST_NAMES:
        return f"{', '.join(shown)} and {len(names) - MOST_NAMES} more"
    return join_and(shown)


def ranks_named(ranks: Sequence[int]) -> str:
    """Returns `rank 2`, or `ranks 0, 1 and 2`.

    Example:
        >>> ranks_named([2]), ranks_named([0, 1, 2])
        ('rank 2', 'ranks 0, 1 and 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {join_and([str(rank) for rank in ranks])}"
