"""Where what a rank holds lies in the parameters of one process, if a script cuts its model over the ranks by itself.

    one process   up.weight [64, 32]   norm.weight [32]
    rank 1        up.weight [32, 32]   norm.weight [32]       rows 32 to 63 of the first, and all of the second

Values tell: those with which both begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.runtime.digest import digest

Values = Mapping[str, Tensor]  # by name


@dataclass(frozen=True, eq=False)
class Place:
    """A parameter of one process, or some of its slices along a dim.

    Attributes:
        name: in one process.
        dim: along which it is cut; None where nothing is.
        index: numbers of the slices, shape [slices]; None where they cannot be told apart.
        candidates: all parameters that it may be, where nothing tells which of them.
    """

    name: str
    dim: int | None = None
    index: Tensor | None = None
    candidates: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.dim is None or self.index is not None

    @property
    def key(self) -> tuple[int, ...] | None:
        """What two ranks that hold the same part have in common; None of a whole parameter."""
        return None if self.dim is None else (self.dim, *([] if self.index is None else self.index.tolist()))

    def held(self, part: Tensor) -> Tensor:
        """Returns a rank's part without what it is padded with."""
        if self.dim is None or self.index is None:
            return part
        return part.narrow(self.dim, 0, len(self.index))

    def of(self, whole: Tensor) -> Tensor:
        """Returns what lies there in a tensor of the whole parameter's shape."""
        if self.dim is None or self.index is None:
            return whole
        return whole.index_select(self.dim, self.index)


def places(held: Values, whole: Values) -> dict[str, Place]:
    """Returns where each tensor that a rank holds lies in those of one process, by the rank's names.

    What has the same numbers as several of them, such as the ones of all norms, lies where its neighbours lie.
    """
    found: dict[str, Place] = {}
    several: dict[str, list[str]] = {}
    by_values: dict[str, list[str]] = {}
    for name, value in whole.items():
        by_values.setdefault(digest(value), []).append(name)
    for name, value in held.items():
        equal = by_values.get(digest(value), [])
        if len(equal) == 1:
            found[name] = Place(equal[0])
        elif equal:
            several[name] = equal
        elif name in whole and (dim := _cut_along(value, whole[name])) is not None:
            index = _slices(value, whole[name], dim)
            if index is not None:
                found[name] = Place(name, dim, index if len(index) else None)
    for name, equal in several.items():
        sure = {one: place for one, place in found.items() if not place.candidates}
        shared = min(_common(equal[0], one) for one in equal[1:])
        beside = next((one for one in [*_beside(name, sure, shared), *_shifted(name, sure)] if one in equal), None)
        own = name if name in equal else None
        is_told = beside or (own and held.keys() == whole.keys())
        found[name] = Place(beside or own or equal[0], candidates=() if is_told else tuple(equal))
    for name, place in found.items():
        if not place.is_known:
            found[name] = _like_neighbours(name, place, found, held, whole)
    return found


def _cut_along(value: Tensor, whole: Tensor) -> int | None:
    """The one dim along which a tensor is smaller than another."""
    if value.dim() != whole.dim():
        return None
    smaller = [dim for dim, (part, all_) in enumerate(zip(value.shape, whole.shape, strict=True)) if part != all_]
    return smaller[0] if len(smaller) == 1 and 0 < value.shape[smaller[0]] < whole.shape[smaller[0]] else None


def _slices(value: Tensor, whole: Tensor, dim: int) -> Tensor | None:
    """The numbers of the slices that a part holds; none if several are alike, and None if one is not found."""
    size = value.shape[dim]
    blocks = [at for at in range(0, whole.shape[dim] - size + 1, size) if whole.narrow(dim, at, size).equal(value)]
    if len(blocks) == 1:
        return torch.arange(blocks[0], blocks[0] + size)
    left = whole.shape[dim] % size  # the last part of a vector is padded with zeros
    if value.dim() == 1 and left and whole[-left:].equal(value[:left]) and not value[left:].any():
        return torch.arange(whole.shape[dim] - left, whole.shape[dim])
    known: dict[str, int] = {}
    for number, one in enumerate(whole.movedim(dim, 0)):
        known.setdefault(digest(one), number)
    numbers = [known.get(digest(one)) for one in value.movedim(dim, 0)]
    if None in numbers:
        return None
    return torch.tensor(numbers if len(known) == whole.shape[dim] else [], dtype=torch.long)


def _beside(name: str, found: Mapping[str, Place], shared: int) -> Iterator[str]:
    """Yields where a parameter lies beside what has been found: `blocks.0.` of a rank is `blocks.2.`, say.

    Of all that it may be, the first `shared` parts of their names are the same, and tell nothing.
    """
    parts = name.split(".")
    for level in range(len(parts) - 1, shared, -1):
        prefix = ".".join([*parts[:level], ""])
        for other, place in found.items():
            rest = other.removeprefix(prefix)
            if other.startswith(prefix) and place.name.endswith(rest):
                yield place.name.removesuffix(rest) + name.removeprefix(prefix)


def _shifted(name: str, found: Mapping[str, Place]) -> Iterator[str]:
    """Yields where a parameter lies if one number in its name is larger by as much as in the names of others.

    In a part of a Sequential "1.weight" is "13.weight" beside "0.weight" at "12.weight".
    """
    for other, place in found.items():
        pairs = list(zip(name.split("."), other.split("."), place.name.split("."), strict=False))
        level = next((number for number, (_, mine, there) in enumerate(pairs) if mine != there), None)
        if level is not None and all(one.isdecimal() for one in pairs[level]):
            own, mine, there = map(int, pairs[level])
            parts = name.split(".")
            yield ".".join([*parts[:level], str(own + there - mine), *parts[level + 1 :]])


def _like_neighbours(name: str, place: Place, found: Mapping[str, Place], held: Values, whole: Values) -> Place:
    """A part whose slices are all alike is cut as what is next to it: a bias of zeros as its weight."""

    def sizes(one: str, at: Place) -> tuple[int, int]:
        dim = at.dim or 0
        return held[one].shape[dim], whole[at.name].shape[dim]

    alike = [
        one
        for one, at in found.items()
        if at.index is not None and at.dim is not None and sizes(one, at) == sizes(name, place)
    ]
    if not alike:
        return place
    nearest = max(alike, key=lambda one: _common(one, name))
    return Place(place.name, place.dim, found[nearest].index)


def _common(one: str, other: str) -> int:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), 0)


def make_the_whole(ranks: Sequence[Mapping[str, Place]], whole: Values) -> bool:
    """Returns whether the parts of all ranks are all of one process's parameters."""
    return all(_is_held(name, value, [at for held in ranks for at in held.values()]) for name, value in whole.items())


def _is_held(name: str, value: Tensor, found: Sequence[Place]) -> bool:
    mine = [place for place in found if place.name == name]
    if any(place.dim is None for place in mine):
        return True
    numbers = {int(one) for place in mine if place.index is not None for one in place.index}
    return bool(mine) and mine[0].dim is not None and len(numbers) == value.shape[mine[0].dim]
