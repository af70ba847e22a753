"""What a declared codec makes of the ranks' gradients and of what they owe: all ranks in one process.

A parameter's pieces are cut and numbered by the model alone, so neither the buckets nor the chunks in which the ranks
have sent them matter, and each parameter is computed by itself. How a sum is cut among threads does matter, and so does
the precision that is asked of matrix products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep import compress
from samestep.compress import simulate
from samestep.compress.chunks import MAX_CHUNK, Chunk, Piece, chunks_of, pieces_of
from samestep.compress.codec import Codec, RowCodec
from samestep.compress.memory import ErrorFeedback
from samestep.compress.schemes import PLAIN, ReductionContext, mean
from samestep.verification.journal import Event

__all__: list[str] = []

Named = Mapping[str, Tensor]


def codec_of(declared: Mapping[str, Any]) -> Codec | None:
    """Returns the codec that declares itself so; None for one of the script's own."""
    settings = dict(declared)
    kind = getattr(compress, settings.pop("codec"), None)
    if not isinstance(kind, type) or not issubclass(kind, Codec):
        return None
    try:
        codec = kind(**settings)
    except TypeError:
        return None
    return codec if codec.declared() == declared else None


@contextlib.contextmanager
def computing_as(event: Event) -> Iterator[None]:
    """Computes with the threads, and in the precision, of the rank that has told of it."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(event["threads"])
    torch.set_float32_matmul_precision(event["precision"])
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


@dataclass(frozen=True)
class Simulated:
    """The ranks of one reduction.

    Attributes:
        codec: as declared.
        seed: of its noise.
        reduction: which one it is, from 0.
        shapes: of all the model's parameters, by name, in order.
        memories: of each rank; changed.
    """

    codec: Codec
    seed: int
    reduction: int
    shapes: Mapping[str, Sequence[int]]
    memories: Sequence[ErrorFeedback]

    def averaged(self, own: Sequence[Named]) -> dict[str, Tensor]:
        """Returns what becomes of each rank's own gradients, by parameter."""
        number, found = 0, {}
        for name, shape in self.shapes.items():
            taken = self.codec.takes(torch.Size(shape))
            pieces = pieces_of(name, shape, number, most=MAX_CHUNK if self.codec.cuts or not taken else None)
            number += len(pieces)
            if name in own[0]:
                found[name] = self._mean(self.codec if taken else PLAIN, pieces, [theirs[name] for theirs in own])
        return found

    def _mean(self, codec: Codec, pieces: list[Piece], own: Sequence[Tensor]) -> Tensor:
        result = own[0].clone()
        for chunk in chunks_of(pieces, codec.block if isinstance(codec, RowCodec) else 1):
            schemes = [
                mean(codec, self._part(chunk, rank), _flat(chunk, gradient.to(result.device)))
                for rank, gradient in enumerate(own)
            ]
            values = chunk.views(simulate.run(schemes).means[0])
            for piece, value in zip(chunk.pieces, values, strict=True):
                _part_of(result, piece).copy_(value)
        return result

    def _part(self, chunk: Chunk, rank: int) -> ReductionContext:
        return ReductionContext(chunk, rank, len(self.memories), self.reduction, self.seed, self.memories[rank])


def _flat(chunk: Chunk, gradient: Tensor) -> Tensor:
    flat = torch.zeros(chunk.length, device=gradient.device)
    for piece, view in zip(chunk.pieces, chunk.views(flat), strict=True):
        view.copy_(_part_of(gradient, piece))
    return flat


def _part_of(gradient: Tensor, piece: Piece) -> Tensor:
    """A piece is cut from the elements as they lie in memory, which has no holes."""
    lying = gradient.as_strided((gradient.numel(),), (1,))
    return lying[piece.begin : piece.begin + piece.elements].view(piece.shape)
