"""A replica's gradients averaged in compressed messages, while backward goes on.

The tensors of a bucket are cut into pieces and put into chunks (:mod:`samestep.compress.chunks`), each of which is
reduced (:mod:`samestep.compress.compressed_mean`); tensors that are exempt are reduced as plain rows. Each round of
messages has a process group and a thread of its own, so while one chunk is sent the next is encoded, and each group
carries chunk after chunk in the same order on all ranks. On a GPU there are no threads: what is issued waits there for
what it needs. PyTorch's compression hooks keep their residuals under a bucket's number, and buckets are others after
the first step and after a resume; here they are kept by parameter, and resume bit for bit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from samestep.compress.chunks import MAX_CHUNK, Chunk, Piece, RowOwners, chunks_of, pieces_of, row_owners
from samestep.compress.codecs import Codec, RowCodec
from samestep.compress.compressed_mean import PLAIN, AllGather, AllToAll, Reduction, ReductionContext, bytes_sent, mean
from samestep.compress.error_feedback import ErrorFeedback, State, redistribute
from samestep.compress.topk import TopK
from samestep.launch.rank.user_code import warn
from samestep.replicas.optimizer_steps import add_step_listener, is_among
from samestep.runtime.axis import Axis
from samestep.runtime.hosts import new_group
from samestep.runtime.process_group.work import WorkerThread

Done = Callable[[Tensor | Exception], None]


class ChunkPipeline:
    """The rounds of messages among the ranks of an axis.

    Collective: every rank of the axis must make it.
    """

    def __init__(self, axis: Axis, rounds: int, *, threads: bool) -> None:
        timeout = timedelta(seconds=axis.timeout_s)
        self._axis = axis
        self._groups = [new_group(axis.ranks, timeout) for _ in range(rounds)]
        self._workers = [WorkerThread(f"compresses {number}") for number in range(rounds + 1)] if threads else []
        self._sent = [0] * rounds  # by each thread's own

    @property
    def sent(self) -> int:
        return sum(self._sent)

    def send(self, scheme: Reduction, done: Done) -> None:
        """Sends a chunk off; `done` gets its mean, or what went wrong, maybe in another thread."""
        self._do(0, lambda: self._go_on(scheme, 0, None, done))

    def _do(self, number: int, act: Callable[[], None]) -> None:
        self._workers[number].add(act) if self._workers else act()

    def _go_on(self, scheme: Reduction, number: int, arriving: Callable[[], Tensor] | None, done: Done) -> None:
        try:
            message = next(scheme) if arriving is None else scheme.send(arriving())
            arriving = self._issue(number, message)
        except StopIteration as end:
            done(end.value)
        except Exception as error:  # noqa: BLE001  (the thread that waits raises it)
            done(error)
        else:
            self._do(number + 1, functools.partial(self._go_on, scheme, number + 1, arriving, done))

    def _issue(self, number: int, message: AllToAll | AllGather) -> Callable[[], Tensor]:
        """Starts sending a message; the result waits for what arrives, and keeps what was sent alive until then."""
        group: Any = self._groups[number]
        size, packets = self._axis.size, message.packets
        self._sent[number] += bytes_sent(message, self._axis.rank, size)
        rows = message.counts[self._axis.rank] if isinstance(message, AllToAll) else len(packets)
        arrived = torch.empty(size, rows, packets.shape[1], dtype=torch.uint8, device=packets.device)
        flat = packets.view(-1)
        if isinstance(message, AllGather):
            work = group._allgather_base(arrived.view(-1), flat)  # noqa: SLF001
        else:
            sent = [count * packets.shape[1] for count in message.counts]
            work = group.alltoall_base(arrived.view(-1), flat, [rows * packets.shape[1]] * size, sent)

        def wait(_: Tensor = packets) -> Tensor:
            work.wait()
            return arrived

        return wait

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


Future = torch.futures.Future[Tensor]


class Bucket(Protocol):
    """Gradients that are handed over together, as DistributedDataParallel's GradBucket has them."""

    def parameters(self) -> list[Tensor]:
        """Whose they are."""

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, in the same order."""

    def buffer(self) -> Tensor:
        """All of them, one after another; means take their place."""

    def is_last(self) -> bool:
        """Whether no other follows in this step."""


BucketListener = Callable[[Axis, Bucket], None]


@dataclass
class _ChunkBuffers:
    codec: Codec  # what it travels by
    chunk: Chunk  # its pieces
    shares: RowOwners  # whose row is whose
    staging: Tensor  # [length], where its gradients are brought together; gaps stay zero


class GradientCompression:
    """How one replica's gradients are compressed; for :class:`samestep.Replica`.

    Attributes:
        codec: as declared.
        steps: reductions so far.
        memory: what this rank remembers.
        watch: is called with every bucket before anything of it is sent; None where nobody watches.
    """

    def __init__(self, module: nn.Module, codec: Codec, seed: int) -> None:
        self.codec = codec
        self.steps = 0
        self.watch: BucketListener | None = None
        self._seed = seed
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._pieces: dict[str, list[Piece]] = {}
        first = 0
        for name, parameter in module.named_parameters():
            taken = codec.takes(parameter.shape)
            if parameter.requires_grad:
                (codec if taken else PLAIN).check_dtype(name, parameter.dtype)
            most = MAX_CHUNK if codec.cuts or not taken else None
            self._pieces[name] = pieces_of(name, parameter.shape, first, most=most)
            first += len(self._pieces[name])
        self.memory = ErrorFeedback(next((each.device for each in module.parameters()), "cpu"))
        self._pipeline: ChunkPipeline | None = None
        self._chunks: dict[tuple[int, ...], list[_ChunkBuffers]] = {}
        self._sent_before = 0
        self._has_warned = False

    @property
    def sent(self) -> int:
        """Bytes of gradients that this rank has sent to others."""
        return self._sent_before + (0 if self._pipeline is None else self._pipeline.sent)

    def connect(self, axis: Axis) -> None:
        """Makes the groups that messages travel in. Collective: every rank must call it."""
        if self._pipeline is None:
            rounds = max(self.codec.rounds, PLAIN.rounds)
            self._pipeline = ChunkPipeline(axis, rounds, threads=self.memory.device.type == "cpu")
            if axis.rank == 0 and isinstance(self.codec, TopK) and self.codec.momentum:
                add_step_listener(self)
        self._chunks.clear()

    def holds(self, optimizer: Optimizer) -> bool:
        return is_among(self._names, optimizer)

    def note_step(self, optimizer: Optimizer, number: int) -> None:
        """Warns of an optimizer with momentum beside the codec's: what is sent has gone through both."""
        del number
        own = max(group.get("momentum", 0) or group.get("betas", (0,))[0] for group in optimizer.param_groups)
        if own and not self._has_warned:
            self._has_warned = True
            warn(
                f"{type(optimizer).__name__} has a momentum of {own:g} beside that of {self.codec.name}, so it counts "
                "twice: leave one of them at 0"
            )

    def reduce_bucket(self, axis: Axis, bucket: Bucket) -> Future:
        """Reduces a bucket; the future is done when its gradients are averaged."""
        assert self._pipeline is not None
        if self.watch is not None:
            self.watch(axis, bucket)
        chunks, buffer, step = self._chunks_of(axis, bucket.parameters()), bucket.buffer(), self.steps
        self.steps += bucket.is_last()
        future = Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])
        flats = dict(zip(map(self._name, bucket.parameters()), map(_flat, bucket.gradients()), strict=True))
        completion = _BucketCompletion(future, buffer, len(chunks))
        for one in chunks:
            gradients = [_part(flats[piece.parameter], piece) for piece in one.chunk.pieces]
            part = ReductionContext(one.chunk, axis.rank, axis.size, step, self._seed, self.memory)
            self._pipeline.send(_averaged(one, part, gradients), partial(completion.take, one.chunk, gradients))
        return future

    def _name(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]

    def _chunks_of(self, axis: Axis, parameters: list[Tensor]) -> list[_ChunkBuffers]:
        key = tuple(map(id, parameters))
        if key not in self._chunks:
            self._chunks[key] = list(self._made(axis, parameters))
        return self._chunks[key]

    def _made(self, axis: Axis, parameters: list[Tensor]) -> Iterator[_ChunkBuffers]:
        for codec in (self.codec, PLAIN):
            mine = [each for each in parameters if self.codec.takes(each.shape) == (codec is self.codec)]
            pieces = [piece for each in mine for piece in self._pieces[self._name(each)]]
            block = codec.block if isinstance(codec, RowCodec) else 1
            for chunk in chunks_of(pieces, block):
                shares = row_owners(chunk, axis.size, self.memory.device)
                yield _ChunkBuffers(codec, chunk, shares, torch.zeros(chunk.length, device=self.memory.device))

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of this rank: not a copy."""
        return {"declared": self.codec.declared(), "steps": self.steps, "owed": self.memory.state()}

    def own(self, states: Sequence[State], axis: Axis) -> State:
        """Returns which of the saved states is this rank's, of its parameters; of another number of ranks, its part."""
        numbers = {piece.name: piece.number for pieces in self._pieces.values() for piece in pieces}
        own = [_only(state, numbers) for state in states]
        if len(own) == axis.size:
            return own[axis.rank]
        return redistribute(own, numbers, self.codec.block if isinstance(self.codec, RowCodec) else 1)

    def load(self, steps: int, residuals: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.steps = steps
        self.memory.load(residuals)

    def release(self) -> None:
        """Lets go of the groups, when the world closes."""
        if self._pipeline is not None:
            self._sent_before += self._pipeline.sent
            self._pipeline.close()
        self._pipeline = None
        self._chunks.clear()


def _averaged(one: _ChunkBuffers, part: ReductionContext, gradients: list[Tensor]) -> Reduction:
    """The mean of a chunk; its gradients are read when it begins."""
    torch._foreach_copy_(one.chunk.views(one.staging), gradients)
    return (yield from mean(one.codec, part, one.staging, one.shares))


def _only(state: State, names: Container[str]) -> State:
    return {kind: {name: part for name, part in pieces.items() if name in names} for kind, pieces in state.items()}


def _flat(gradient: Tensor) -> Tensor:
    """Returns a gradient's elements as they lie in the bucket, which has no holes."""
    return gradient.as_strided((gradient.numel(),), (1,))


def _part(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.begin : piece.begin + piece.elements].view(piece.shape)


@dataclass
class _BucketCompletion:
    """Puts the means of a bucket's chunks in place, and tells when all are."""

    future: Future
    buffer: Tensor
    left: int  # chunks
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, chunk: Chunk, gradients: list[Tensor], found: Tensor | Exception) -> None:
        if not isinstance(found, Exception):
            torch._foreach_copy_(gradients, chunk.views(found))
        with self.lock:
            failed = isinstance(found, Exception) and self.left > 0
            self.left = 0 if failed else self.left - 1
            is_last = self.left == 0
        if isinstance(found, Exception):
            if failed:
                self.future.set_exception(found)  # type: ignore[arg-type]  # takes exceptions all the same
        elif is_last:
            self.future.set_result(self.buffer)
