"""The mean of the ranks' gradients in compressed messages: what each rank does, without saying how messages travel.

A scheme is a generator: it yields a message and is sent what arrives. :mod:`samestep.compress.simulate` runs all ranks'
in one process, :mod:`samestep.replicas.compression` one rank's over a process group.

    rows (int8, ...)    [1] encode, to each rank its share   [2] add the share in float32, encode, to all   decode
    largest             [3] to all                           add what all have sent
    low rank            the mean of P by plain rows [1] [2], orthogonalised, then of Q likewise

Of n bytes a rank sends (N-1)/N·n/4 at [1] and as much at [2]: a quarter of a ring's at any number of ranks. PyTorch's
quantisation hooks send all of it to all, (N-1)·n/4: as much as the ring's at 8 ranks, and more from there on. What [2]
loses is remembered as well, by the rank whose share it is. Source: H. Tang et al., "DoubleSqueeze: Parallel Stochastic
Gradient Descent with Double-Pass Error-Compensated Compression", ICML 2019.

All ranks decode the same bytes, and a share is added in the order of the ranks: the result is the same everywhere, to
the bit.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.compress.chunks import Chunk, Piece, RowOwners, shares_of
from samestep.compress.codec import Codec, Plain, RowCodec
from samestep.compress.lowrank import PowerSGD, as_matrix, first_guess, orthonormal
from samestep.compress.memory import ErrorFeedback
from samestep.compress.noise import Noise
from samestep.compress.topk import TopK, largest_places

__all__: list[str] = []

PLAIN = Plain()


@dataclass(frozen=True)
class AllToAll:
    """A message to every rank, its own part each.

    Attributes:
        packets: [sum of counts, bytes], rank after rank.
        counts: rows for each rank; as many come from each as are this rank's own.
    """

    packets: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class AllGather:
    """The same message to every rank.

    Attributes:
        packets: [rows, bytes], as many on every rank; what arrives is [N, rows, bytes].
    """

    packets: Tensor


Scheme = Generator[AllToAll | AllGather, Tensor, Tensor]


@dataclass(frozen=True)
class ReductionContext:
    """One rank's part in the sum of one chunk.

    Attributes:
        chunk: whose rows they are.
        rank: this one.
        size: how many there are.
        step: the number of the reduction, from 0.
        seed: of the noise.
        memory: what this rank remembers.
    """

    chunk: Chunk
    rank: int
    size: int
    step: int
    seed: int
    memory: ErrorFeedback

    def shares(self, device: torch.device) -> RowOwners:
        """Whose row is whose."""
        return shares_of(self.chunk, self.size, device)

    def noise(self, stage: int, lengths: list[int], device: torch.device) -> Tensor:
        """Returns uniform numbers, [sum of lengths], for what this rank brings (stage 0) or has added (1)."""
        return Noise(self.seed, self.step, self.rank, device).of(self.chunk, stage, lengths)


def mean(codec: Codec, part: ReductionContext, flat: Tensor, shares: RowOwners | None = None) -> Scheme:
    """The mean over the ranks of a chunk's rows.

    Args:
        codec: as declared.
        part: this rank's.
        flat: [length of the chunk] of float32; may be changed.
        shares: whose row is whose, where that is known already.

    Returns:
        The mean, as long.
    """
    if isinstance(codec, TopK):
        return _mean_of_largest(codec, part, flat)
    if isinstance(codec, PowerSGD):
        return _mean_of_low_rank(codec, part, flat)
    assert isinstance(codec, RowCodec)
    return _mean_of_rows(codec, part, flat, shares or part.shares(flat.device))


def _mean_of_rows(codec: RowCodec, part: ReductionContext, flat: Tensor, shares: RowOwners) -> Scheme:
    chunk, mine = part.chunk, shares.counts[part.rank]
    owned = [rows * codec.block for rows in shares.pieces[part.rank]]
    packets = _encoded(codec, part, flat.view(-1, codec.block), 0, list(chunk.lengths))
    arrived = yield AllToAll(_picked(packets, shares.order), shares.counts)  # [1]
    total = codec.decode(arrived[0])
    for packets in arrived[1:]:
        total += codec.decode(packets)
    packets = _encoded(codec, part, total.div_(part.size), 1, owned)
    everybody = yield AllGather(torch.nn.functional.pad(packets, (0, 0, 0, shares.most - mine)))  # [2]
    return codec.decode(_picked(everybody.flatten(0, 1), shares.places)).view(-1)


def _encoded(codec: RowCodec, part: ReductionContext, rows: Tensor, stage: int, lengths: list[int]) -> Tensor:
    """Returns packets of rows and what is owed, and remembers what they lose."""
    noise = part.noise(stage, lengths, rows.device).view_as(rows) if codec.needs_noise else None
    if not codec.feedback:
        return codec.encode(rows, noise)
    owed = part.memory.of(("brought", "added")[stage], part.chunk, lengths).view_as(rows)
    packets = codec.encode(owed.add_(rows), noise)
    _forgive(owed.sub_(codec.decode(packets)))
    return packets


def _forgive(owed: Tensor) -> None:
    """Forgets what is not finite, which would be owed for ever; the guard has seen the gradient itself."""
    if not bool(torch.isfinite(owed.sum())):
        owed.nan_to_num_(0.0, 0.0, 0.0)


def _picked(packets: Tensor, rows: Tensor) -> Tensor:
    """Returns some rows; four bytes at a time."""
    return packets.view(torch.int32)[rows].view(torch.uint8)


def _mean_of_largest(codec: TopK, part: ReductionContext, flat: Tensor) -> Scheme:
    lengths = part.chunk.lengths
    owed = part.memory.of("owed", part.chunk, lengths)
    if codec.momentum:
        late = part.memory.of("late", part.chunk, lengths)
        owed += late.mul_(codec.momentum).add_(flat)
    else:
        owed += flat
    begins = torch.tensor([0, *lengths]).cumsum(0).tolist()
    places = torch.cat(
        [
            largest_places(piece, codec.count(piece.numel(), part.step)) + begin
            for piece, begin in zip(owed.split_with_sizes(list(lengths)), begins, strict=False)
        ]
    )
    packets = torch.empty(len(places), 2, dtype=torch.int32, device=flat.device)
    packets[:, 0] = places
    packets[:, 1].view(torch.float32).copy_(owed[places])
    owed[places] = 0.0
    if codec.momentum:
        late[places] = 0.0
        _forgive(late)
    _forgive(owed)
    arrived = yield AllGather(packets.view(torch.uint8))  # [3]
    total = torch.zeros_like(flat)
    for packets in arrived:
        words = packets.view(torch.int32)
        total.index_add_(0, words[:, 0], words[:, 1].view(torch.float32))
    return total.div_(part.size)


def _mean_of_low_rank(codec: PowerSGD, part: ReductionContext, flat: Tensor) -> Scheme:
    pieces = part.chunk.pieces
    shapes = [as_matrix(piece.shape) for piece in pieces]
    widths = [columns * codec.rank for _, columns in shapes]
    basis = part.memory.of("basis", part.chunk, widths)
    guesses = _views(basis, [(columns, codec.rank) for _, columns in shapes])
    for guess, piece in zip(guesses, pieces, strict=True):
        if not bool(guess.any()):
            guess.copy_(first_guess(len(guess), codec.rank, part.seed + piece.number))
    if codec.feedback:
        flat = part.memory.of("owed", part.chunk, part.chunk.lengths).add_(flat)
    matrices = [view.view(shape) for view, shape in zip(part.chunk.views(flat), shapes, strict=True)]
    tall = torch.cat([(matrix @ guess).view(-1) for matrix, guess in zip(matrices, guesses, strict=True)])
    tall = yield from _plain_mean(part, tall)
    heights = [(rows, codec.rank) for rows, _ in shapes]
    columns = [orthonormal(each) if bool(each.isfinite().all()) else each for each in _views(tall, heights)]
    for guess, matrix, column in zip(guesses, matrices, columns, strict=True):
        torch.mm(matrix.T, column, out=guess)
    if codec.feedback:
        for guess, matrix, column in zip(guesses, matrices, columns, strict=True):
            matrix.addmm_(column, guess.T, alpha=-1)
        _forgive(flat)
    basis.copy_((yield from _plain_mean(part, basis.clone())))
    total = torch.zeros_like(flat)
    for view, guess, column in zip(part.chunk.views(total), guesses, columns, strict=True):
        view.copy_((column @ guess.T).view(view.shape))
    if not bool(torch.isfinite(basis.sum())):
        basis.zero_()  # begins anew, on every rank
    return total


def _plain_mean(part: ReductionContext, values: Tensor) -> Generator[AllToAll | AllGather, Tensor, Tensor]:
    """The mean of values as they are, [n]."""
    size = values.numel()
    rows = -(-size // PLAIN.block)
    flat = torch.nn.functional.pad(values, (0, rows * PLAIN.block - size))
    whole = ReductionContext(
        Chunk((Piece("", 0, 0, (size,)),), PLAIN.block), part.rank, part.size, part.step, 0, part.memory
    )
    found = yield from _mean_of_rows(PLAIN, whole, flat, whole.shares(flat.device))
    return found[:size]


def _views(flat: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    sizes = [rows * columns for rows, columns in shapes]
    return [part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)]
