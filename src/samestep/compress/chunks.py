"""What travels together: parameters' gradients cut into pieces, and pieces put into chunks.

    parameters    embedding.weight (2.5 M)                     fc1.weight (0.3 M)   fc2.weight (0.2 M)
    pieces        [0 .. 1 M)   [1 M .. 2 M)   [2 M .. 2.5 M)   fc1.weight           fc2.weight
    chunks        0            1              2                 └─────── 3 ────────────────┘

A piece is cut and numbered by the model alone, frozen parameters included. So its bits do not depend on
DistributedDataParallel's buckets, which change after the first step and are others after a resume; chunks may.

A rank owns a share of each chunk: it adds the rows of its share for all. Row j of piece p is rank (j + p) mod N's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_CHUNK = 1 << 20  # elements of a piece, and of a chunk of several


@dataclass(frozen=True)
class Piece:
    """A part of a parameter's gradient, or all of it."""

    parameter: str
    number: int  # among all pieces of the model
    begin: int  # its first element in the parameter
    shape: tuple[int, ...]  # of all its elements: one dim where the parameter is cut

    @property
    def name(self) -> str:
        return f"{self.parameter}@{self.begin}"

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


def pieces_of(parameter: str, shape: Sequence[int], first: int, *, most: int | None = MAX_CHUNK) -> list[Piece]:
    """Cuts a parameter's gradient into pieces of `most` elements, numbered from `first` on; into one if None."""
    size = torch.Size(shape).numel()
    if most is None or size <= most:
        return [Piece(parameter, first, 0, tuple(shape))]
    begins = range(0, size, most)
    return [Piece(parameter, first + place, begin, (min(most, size - begin),)) for place, begin in enumerate(begins)]


def chunks_of(pieces: Iterable[Piece], block: int, most: int = MAX_CHUNK) -> list[Chunk]:
    """Puts pieces together, in their order, as long as they have `most` elements at most."""
    chunks: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not chunks or piece.elements > room:
            chunks.append([])
            room = most
        chunks[-1].append(piece)
        room -= piece.elements
    return [Chunk(tuple(chunk), block) for chunk in chunks]


@dataclass(frozen=True)
class Chunk:
    """Pieces one after another, each from the beginning of a row of `block` elements on."""

    pieces: tuple[Piece, ...]
    block: int

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """How many rows each piece has; its last may be filled up with zeros."""
        return tuple(-(-piece.elements // self.block) for piece in self.pieces)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(rows * self.block for rows in self.rows)

    @property
    def length(self) -> int:
        return sum(self.lengths)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns the pieces in `flat`, [length], in their shapes."""
        parts = flat.split_with_sizes(list(self.lengths))
        return [part[: piece.elements].view(piece.shape) for part, piece in zip(parts, self.pieces, strict=True)]


@dataclass(frozen=True)
class RowOwners:
    """Which rank adds which rows."""

    order: Tensor  # [R], the rows, rank after rank
    counts: tuple[int, ...]  # how many each rank has
    places: Tensor  # [R], where each row stands when as many rows of each rank are put together
    pieces: tuple[tuple[int, ...], ...]  # [rank][piece], how many rows of each piece


def row_owners(chunk: Chunk, size: int, device: torch.device | str = "cpu") -> RowOwners:
    """Returns which of so many ranks adds which rows of a chunk."""
    pairs = list(zip(chunk.pieces, chunk.rows, strict=True))
    owners = torch.cat([(torch.arange(rows) + piece.number) % size for piece, rows in pairs])
    order = torch.argsort(owners, stable=True)
    counts = tuple(torch.bincount(owners, minlength=size).tolist())
    within = torch.cat([torch.arange(count) for count in counts])
    places = torch.empty_like(order)
    places[order] = owners[order] * max(counts) + within
    pieces = tuple(
        tuple(len(range((rank - piece.number) % size, rows, size)) for piece, rows in pairs) for rank in range(size)
    )
    return RowOwners(order.to(device), counts, places.to(device), pieces)
