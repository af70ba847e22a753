"""What a rank remembers from step to step, piece by piece: what it still owes the others, above all.

Pieces of one chunk lie one after another, so that a chunk is one operation; when DistributedDataParallel builds other
buckets, they are put together anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from samestep.compress.chunks import Chunk

__all__: list[str] = []

State = dict[str, dict[str, Tensor]]  # kind -> piece -> [elements]


class ErrorFeedback:
    """Of one rank; all of it begins as zeros.

    Args:
        device: where it lies.

    Attributes:
        device: likewise.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._pieces: State = {}
        self._joined: dict[tuple[str, tuple[str, ...]], Tensor] = {}

    def of(self, kind: str, chunk: Chunk, lengths: Sequence[int]) -> Tensor:
        """Returns a chunk's memory of one kind, [sum of lengths] of float32, to be changed in place.

        Args:
            kind: what for.
            chunk: whose.
            lengths: elements for each of its pieces.
        """
        names = tuple(piece.name for piece in chunk.pieces)
        joined = self._joined.get((kind, names))
        if joined is None:
            joined = self._join(kind, names, lengths)
        return joined

    def _join(self, kind: str, names: tuple[str, ...], lengths: Sequence[int]) -> Tensor:
        pieces = self._pieces.setdefault(kind, {})
        zeros = torch.zeros(max(lengths, default=0), device=self.device)
        parts = [pieces.get(name, zeros[:length]) for name, length in zip(names, lengths, strict=True)]
        joined = torch.cat(parts) if parts else zeros
        for old in [key for key in self._joined if key[0] == kind and not set(names).isdisjoint(key[1])]:
            del self._joined[old]
        self._joined[kind, names] = joined
        pieces.update(zip(names, joined.split_with_sizes(list(lengths)), strict=True))
        return joined

    def state(self) -> State:
        """Returns all of it, as it is now: not a copy."""
        return {kind: dict(pieces) for kind, pieces in self._pieces.items()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes over what `state` has returned, here or on another device."""
        self._joined.clear()
        self._pieces = {
            kind: {name: part.to(self.device, torch.float32) for name, part in pieces.items()}
            for kind, pieces in state.items()
        }
