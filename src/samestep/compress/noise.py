"""Noise for stochastic rounding, the same for the same step, whatever buckets it comes in.

Drawing 4 million numbers takes 36 ms, quantising them 8. So a table of uniform numbers is drawn once, and each piece
reads on from another place in it, which a hash of step, rank and piece gives. Each element's noise is uniform over the
steps, which is what makes rounding unbiased; that neighbours have the same neighbours again some day does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import xxhash
from torch import Tensor

from samestep.compress.chunks import MAX_CHUNK, Chunk

__all__: list[str] = []

_SEED = 20_261_122
_BEGINS = 1_048_573  # a prime: places to begin at


@cache
def _table(device: torch.device) -> Tensor:
    return torch.rand(_BEGINS + 2 * MAX_CHUNK, generator=torch.Generator().manual_seed(_SEED)).to(device)


@dataclass(frozen=True)
class Noise:
    """The noise of one rank in one step.

    Args:
        seed: of the run.
        step: which reduction it is.
        rank: whose.
        device: where it lies.
    """

    seed: int
    step: int
    rank: int
    device: torch.device

    def of(self, chunk: Chunk, stage: int, lengths: Sequence[int]) -> Tensor:
        """Returns uniform numbers in [0, 1), [sum of lengths].

        Args:
            chunk: for whose pieces.
            stage: 0 for what a rank brings, 1 for what it has added.
            lengths: elements of each piece.
        """
        table = _table(self.device)
        begins = [self._begin(stage, piece.number) for piece in chunk.pieces]
        return torch.cat([table[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)])

    def _begin(self, stage: int, piece: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{self.seed} {self.step} {self.rank} {stage} {piece}".encode()) % _BEGINS
