"""What a rank remembers from step to step, piece by piece: above all the residuals that it has not sent yet.

worker_error       what encoding a rank's own gradients lost                           (rows)
server_error       what encoding the mean of a rank's share lost                       (rows)
residual, momentum what a rank has not sent yet, and its momentum                      (largest, low rank)
basis              PowerSGD's Q, the same on all ranks

The first two names are DeepSpeed's. Pieces of one chunk lie one after another, so that a chunk is one operation; when
DistributedDataParallel builds other buckets, they are joined anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from samestep.compress.chunks import Chunk

State = dict[str, dict[str, Tensor]]  # kind -> piece -> [elements]


class ErrorFeedback:
    """The memory of one rank; all of it begins as zeros."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._pieces: State = {}
        self._joined: dict[tuple[str, tuple[str, ...]], Tensor] = {}

    def of(self, kind: str, chunk: Chunk, lengths: Sequence[int]) -> Tensor:
        """Returns a chunk's memory of one kind, [sum of lengths] of float32, to be changed in place."""
        names = tuple(piece.name for piece in chunk.pieces)
        if (kind, names) in self._joined:
            return self._joined[kind, names]
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
        """Continues from what `state` has returned, here or on another device."""
        self._joined.clear()
        self._pieces = {
            kind: {name: part.to(self.device, torch.float32) for name, part in pieces.items()}
            for kind, pieces in state.items()
        }


def redistribute(states: Sequence[State], numbers: Mapping[str, int], block: int) -> State:
    """Returns what every rank of a world of another size remembers: nothing is lost, and the next mean is the same.

    A mean is taken of what ranks bring, so the mean of their own memory goes to every new rank; the server errors, of
    the mean already, are put together from the shares, and become worker errors of every new rank.

    `numbers` are those of the pieces, by name, and `block` the elements of a row.
    """
    made: State = {}
    for kind, pieces in states[0].items():
        if kind == "basis":
            made[kind] = {name: part.clone() for name, part in pieces.items()}
        elif kind != "server_error":
            made[kind] = {name: torch.stack([state[kind][name] for state in states]).mean(0) for name in pieces}
    for name in states[0].get("server_error", {}):
        shares = [state["server_error"][name] for state in states]
        whole = torch.zeros(sum(share.numel() for share in shares) // block, block)
        for rank, share in enumerate(shares):  # samestep.compress.chunks says whose rows are whose
            whole[(rank - numbers[name]) % len(shares) :: len(shares)] = share.view(-1, block)
        worker_error = made.setdefault("worker_error", {}).setdefault(name, torch.zeros(whole.numel()))
        worker_error += whole.view(-1)
    return made
