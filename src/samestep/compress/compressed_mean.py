"""The mean of the ranks' gradients in compressed messages: what each rank does, without saying how messages travel.

A reduction is a generator: it yields a message and is sent what arrives. :func:`run_all` runs all ranks' in one
process, :mod:`samestep.replicas.compression` one rank's over a process group.

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

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import xxhash
from torch import Tensor

from samestep.compress import topk
from samestep.compress.chunks import MAX_CHUNK, Chunk, Piece, RowOwners, row_owners
from samestep.compress.codecs import Codec, Plain, RowCodec
from samestep.compress.error_feedback import ErrorFeedback
from samestep.compress.powersgd import PowerSGD, as_matrix, orthonormal
from samestep.compress.topk import TopK

PLAIN = Plain()


@dataclass(frozen=True)
class AllToAll:
    """A message to every rank, its own part each."""

    packets: Tensor  # [sum of counts, bytes], rank after rank
    counts: tuple[int, ...]  # rows for each rank; as many come from each as are this rank's own


@dataclass(frozen=True)
class AllGather:
    """The same message to every rank: [rows, bytes], as many on every rank; what arrives is [N, rows, bytes]."""

    packets: Tensor


Message = AllToAll | AllGather
Reduction = Generator[Message, Tensor, Tensor]


@dataclass(frozen=True)
class ReductionContext:
    """One rank's part in the sum of one chunk."""

    chunk: Chunk  # that is summed
    rank: int  # this one
    size: int  # how many there are
    step: int  # the number of the reduction, from 0
    seed: int  # of the rounding noise
    memory: ErrorFeedback  # what this rank remembers

    def noise(self, stage: int, lengths: list[int], device: torch.device) -> Tensor:
        """Returns uniform numbers in [0, 1), [sum of lengths], the same for the same step, in whatever buckets.

        Drawing 4 million numbers takes 36 ms, quantising them 8. So a table is drawn once, and each piece reads on from
        another place in it, a hash of step, rank and piece. Each element's noise is uniform over the steps, which is
        what makes rounding unbiased; that neighbours have the same neighbours again some day does no harm.

        `stage` is 0 for what this rank brings, 1 for its share of the mean; `lengths` are the elements of each piece.
        """
        table = _noise_table(device)
        parts = []
        for piece, length in zip(self.chunk.pieces, lengths, strict=True):
            key = f"{self.seed} {self.step} {self.rank} {stage} {piece.number}"
            begin = xxhash.xxh3_64_intdigest(key.encode()) % _NOISE_BEGINS
            parts.append(table[begin : begin + length])
        return torch.cat(parts)


_NOISE_BEGINS = 1_048_573  # a prime


@cache
def _noise_table(device: torch.device) -> Tensor:
    return torch.rand(_NOISE_BEGINS + 2 * MAX_CHUNK, generator=torch.Generator().manual_seed(20_261_122)).to(device)


def mean(codec: Codec, context: ReductionContext, flat: Tensor, owners: RowOwners | None = None) -> Reduction:
    """The mean over the ranks of a chunk's rows; `flat`, [length of the chunk] of float32, may be changed."""
    if isinstance(codec, TopK):
        return _mean_of_largest(codec, context, flat)
    if isinstance(codec, PowerSGD):
        return _mean_of_low_rank(codec, context, flat)
    assert isinstance(codec, RowCodec)
    return _mean_of_rows(codec, context, flat, owners or row_owners(context.chunk, context.size, flat.device))


def _mean_of_rows(codec: RowCodec, context: ReductionContext, flat: Tensor, owners: RowOwners) -> Reduction:
    own = [rows * codec.block for rows in owners.pieces[context.rank]]
    packets = _encode(codec, context, flat.view(-1, codec.block), 0, list(context.chunk.lengths))
    arrived = yield AllToAll(_pick_rows(packets, owners.order), owners.counts)  # [1]
    total = codec.decode(arrived[0])
    for packets in arrived[1:]:
        total += codec.decode(packets)
    packets = _encode(codec, context, total.div_(context.size), 1, own)
    missing = max(owners.counts) - owners.counts[context.rank]
    everyone = yield AllGather(torch.nn.functional.pad(packets, (0, 0, 0, missing)))  # [2]
    return codec.decode(_pick_rows(everyone.flatten(0, 1), owners.places)).view(-1)


def _encode(codec: RowCodec, context: ReductionContext, rows: Tensor, stage: int, lengths: list[int]) -> Tensor:
    """Returns packets of rows and the error of the last step, and remembers what they lose."""
    noise = context.noise(stage, lengths, rows.device).view_as(rows) if codec.needs_noise else None
    if not codec.feedback:
        return codec.encode(rows, noise)
    error = context.memory.of(("worker_error", "server_error")[stage], context.chunk, lengths).view_as(rows)
    packets = codec.encode(error.add_(rows), noise)
    _drop_nonfinite(error.sub_(codec.decode(packets)))
    return packets


def _drop_nonfinite(residual: Tensor) -> None:
    """Forgets what would be kept for ever; the drift guard has seen the gradient itself."""
    if not bool(torch.isfinite(residual.sum())):
        residual.nan_to_num_(0.0, 0.0, 0.0)


def _pick_rows(packets: Tensor, rows: Tensor) -> Tensor:
    return packets.view(torch.int32)[rows].view(torch.uint8)  # four bytes at a time


def _mean_of_largest(codec: TopK, context: ReductionContext, flat: Tensor) -> Reduction:
    lengths = context.chunk.lengths
    residual = context.memory.of("residual", context.chunk, lengths)
    if codec.momentum:
        momentum = context.memory.of("momentum", context.chunk, lengths)
        residual += momentum.mul_(codec.momentum).add_(flat)
    else:
        residual += flat
    begins = torch.tensor([0, *lengths]).cumsum(0).tolist()
    places = torch.cat(
        [
            topk.largest_places(piece, codec.count(piece.numel(), context.step)) + begin
            for piece, begin in zip(residual.split_with_sizes(list(lengths)), begins, strict=False)
        ]
    )
    packets = topk.encode(residual, places)
    residual[places] = 0.0
    if codec.momentum:
        momentum[places] = 0.0
        _drop_nonfinite(momentum)
    _drop_nonfinite(residual)
    arrived = yield AllGather(packets)  # [3]
    total = torch.zeros_like(flat)
    for packets in arrived:
        topk.add_decoded(total, packets)
    return total.div_(context.size)


def _mean_of_low_rank(codec: PowerSGD, context: ReductionContext, flat: Tensor) -> Reduction:
    pieces = context.chunk.pieces
    shapes = [as_matrix(piece.shape) for piece in pieces]
    basis = context.memory.of("basis", context.chunk, [columns * codec.rank for _, columns in shapes])
    guesses = _views(basis, [(columns, codec.rank) for _, columns in shapes])
    for guess, piece in zip(guesses, pieces, strict=True):
        if not bool(guess.any()):  # to begin with, the same on every rank
            generator = torch.Generator().manual_seed(context.seed + piece.number)
            guess.copy_(torch.randn(len(guess), codec.rank, generator=generator))
    if codec.feedback:
        flat = context.memory.of("residual", context.chunk, context.chunk.lengths).add_(flat)
    matrices = [view.view(shape) for view, shape in zip(context.chunk.views(flat), shapes, strict=True)]
    tall = torch.cat([(matrix @ guess).view(-1) for matrix, guess in zip(matrices, guesses, strict=True)])
    tall = yield from _plain_mean(context, tall)
    heights = [(rows, codec.rank) for rows, _ in shapes]
    columns = [orthonormal(each) if bool(each.isfinite().all()) else each for each in _views(tall, heights)]
    for guess, matrix, column in zip(guesses, matrices, columns, strict=True):
        torch.mm(matrix.T, column, out=guess)
        if codec.feedback:
            matrix.addmm_(column, guess.T, alpha=-1)
    if codec.feedback:
        _drop_nonfinite(flat)
    basis.copy_((yield from _plain_mean(context, basis.clone())))
    total = torch.zeros_like(flat)
    for view, guess, column in zip(context.chunk.views(total), guesses, columns, strict=True):
        view.copy_((column @ guess.T).view(view.shape))
    if not bool(torch.isfinite(basis.sum())):
        basis.zero_()  # begins anew, on every rank
    return total


def _plain_mean(context: ReductionContext, values: Tensor) -> Reduction:
    """The mean of values as they are, [n]."""
    size = values.numel()
    flat = torch.nn.functional.pad(values, (0, -size % PLAIN.block))
    chunk = Chunk((Piece("", 0, 0, (size,)),), PLAIN.block)
    plain = ReductionContext(chunk, context.rank, context.size, context.step, 0, context.memory)
    found = yield from _mean_of_rows(PLAIN, plain, flat, row_owners(chunk, context.size, flat.device))
    return found[:size]


def _views(flat: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    sizes = [rows * columns for rows, columns in shapes]
    return [part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)]


def bytes_sent(message: Message, rank: int, size: int) -> int:
    """Returns how many bytes of a message leave the rank."""
    if isinstance(message, AllGather):
        return message.packets.nbytes * (size - 1)
    return message.packets.nbytes - message.counts[rank] * message.packets.shape[1]


def run_all(reductions: Sequence[Reduction]) -> tuple[list[Tensor], list[int]]:
    """Runs the reductions of all ranks in one process; returns the mean of each, and the bytes that it would send."""
    size = len(reductions)
    messages = [next(reduction) for reduction in reductions]
    sent = [0] * size
    while True:
        for rank, message in enumerate(messages):
            sent[rank] += bytes_sent(message, rank, size)
        arrived = [torch.stack([_part_for(rank, message) for message in messages]) for rank in range(size)]
        ends = []
        for rank, reduction in enumerate(reductions):
            try:
                messages[rank] = reduction.send(arrived[rank])
            except StopIteration as end:
                ends.append(end.value)
        if ends:
            assert len(ends) == size, "some ranks are done, and others send"
            return ends, sent


def _part_for(rank: int, message: Message) -> Tensor:
    if isinstance(message, AllGather):
        return message.packets
    return message.packets.split_with_sizes(list(message.counts))[rank]
