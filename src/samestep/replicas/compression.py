"""A replica's gradients averaged in compressed messages, while backward goes on.

DistributedDataParallel hands over a bucket when its gradients are there; its tensors are cut into pieces and put into
chunks (:mod:`samestep.compress.chunks`), each of which runs through a scheme (:mod:`samestep.compress.schemes`) on a
line of threads (:mod:`samestep.replicas.line`). Tensors that are exempt run through the same as plain rows.

PyTorch's compression hooks keep what they owe under a bucket's number, and buckets are others after the first step and
after a resume; none of them but PowerSGD's can be saved. Here it is kept by parameter, and what is owed in a checkpoint
resumes bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from samestep.compress.chunks import MAX_CHUNK, Chunk, Piece, RowOwners, chunks_of, pieces_of
from samestep.compress.codec import Codec, RowCodec
from samestep.compress.folding import redistribute
from samestep.compress.memory import ErrorFeedback, State
from samestep.compress.schemes import PLAIN, ReductionContext, Scheme, mean
from samestep.compress.topk import TopK
from samestep.launch.warning import warn
from samestep.replicas.line import Line
from samestep.replicas.rounds import is_among, watch_steps
from samestep.runtime.axes import Axis

__all__: list[str] = []

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


Watch = Callable[[Axis, Bucket], None]


@dataclass
class _Load:
    """A chunk of a bucket, and what is known of it as long as the bucket stays.

    Attributes:
        codec: what it travels by.
        chunk: its pieces.
        shares: whose row is whose.
        staging: [length], where its gradients are brought together; gaps stay zero.
    """

    codec: Codec
    chunk: Chunk
    shares: RowOwners
    staging: Tensor


class GradientCompression:
    """How one replica's gradients are compressed; for :class:`samestep.Replica`.

    Args:
        module: the bare model.
        codec: as declared.
        seed: of the noise of stochastic rounding.

    Attributes:
        codec: as declared.
        steps: reductions so far.
        memory: what this rank remembers.
        watch: is called with every bucket before anything of it is sent; None where nobody watches.

    Raises:
        UsageError: the codec does not fit a parameter's dtype.
    """

    def __init__(self, module: nn.Module, codec: Codec, seed: int) -> None:
        self.codec = codec
        self.steps = 0
        self.watch: Watch | None = None
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
        self._line: Line | None = None
        self._loads: dict[tuple[int, ...], list[_Load]] = {}
        self._sent_before = 0
        self._has_warned = False

    @property
    def sent(self) -> int:
        """Bytes of gradients that this rank has sent to others."""
        return self._sent_before + (0 if self._line is None else self._line.sent)

    def connect(self, axis: Axis) -> None:
        """Makes the groups that messages travel in. Collective: every rank must call it."""
        if self._line is None:
            rounds = max(self.codec.rounds, PLAIN.rounds)
            self._line = Line(axis, rounds, threads=self.memory.device.type == "cpu")
            if axis.rank == 0 and isinstance(self.codec, TopK) and self.codec.momentum:
                watch_steps(self)
        self._loads.clear()

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has parameters of this model."""
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

    def take(self, axis: Axis, bucket: Bucket) -> Future:
        """Takes a bucket; the future is done when its gradients are averaged."""
        assert self._line is not None
        if self.watch is not None:
            self.watch(axis, bucket)
        loads, buffer, step = self._loads_of(axis, bucket.parameters()), bucket.buffer(), self.steps
        self.steps += bucket.is_last()
        future = Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])
        flats = dict(zip(map(self._name, bucket.parameters()), map(_flat, bucket.gradients()), strict=True))
        ending = _Ending(future, buffer, len(loads))
        for load in loads:
            gradients = [_part(flats[piece.parameter], piece) for piece in load.chunk.pieces]
            part = ReductionContext(load.chunk, axis.rank, axis.size, step, self._seed, self.memory)
            self._line.send(_averaged(load, part, gradients), partial(ending.take, load.chunk, gradients))
        return future

    def _name(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]

    def _loads_of(self, axis: Axis, parameters: list[Tensor]) -> list[_Load]:
        key = tuple(map(id, parameters))
        if key not in self._loads:
            self._loads[key] = list(self._made(axis, parameters))
        return self._loads[key]

    def _made(self, axis: Axis, parameters: list[Tensor]) -> Iterator[_Load]:
        for codec in (self.codec, PLAIN):
            mine = [each for each in parameters if self.codec.takes(each.shape) == (codec is self.codec)]
            pieces = [piece for each in mine for piece in self._pieces[self._name(each)]]
            block = codec.block if isinstance(codec, RowCodec) else 1
            for chunk in chunks_of(pieces, block):
                shares = ReductionContext(chunk, axis.rank, axis.size, 0, 0, self.memory).shares(self.memory.device)
                yield _Load(codec, chunk, shares, torch.zeros(chunk.length, device=self.memory.device))

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

    def load(self, steps: int, owed: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes on from there."""
        self.steps = steps
        self.memory.load(owed)

    def release(self) -> None:
        """Lets go of the groups, when the world closes."""
        if self._line is not None:
            self._sent_before += self._line.sent
            self._line.close()
        self._line = None
        self._loads.clear()


def _averaged(load: _Load, part: ReductionContext, gradients: list[Tensor]) -> Scheme:
    """The mean of a chunk; its gradients are read when it begins."""
    torch._foreach_copy_(load.chunk.views(load.staging), gradients)
    return (yield from mean(load.codec, part, load.staging, load.shares))


def _only(state: State, names: Container[str]) -> State:
    return {kind: {name: part for name, part in pieces.items() if name in names} for kind, pieces in state.items()}


def _flat(gradient: Tensor) -> Tensor:
    """Returns a gradient's elements as they lie in the bucket, which has no holes."""
    return gradient.as_strided((gradient.numel(),), (1,))


def _part(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.begin : piece.begin + piece.elements].view(piece.shape)


class _Ending:
    """Puts the means of a bucket's chunks in place, and tells when all are.

    Args:
        future: to be done then.
        buffer: the bucket.
        chunks: how many there are.
    """

    def __init__(self, future: Future, buffer: Tensor, chunks: int) -> None:
        self._future = future
        self._buffer = buffer
        self._left = chunks
        self._lock = threading.Lock()

    def take(self, chunk: Chunk, gradients: list[Tensor], found: Tensor | Exception) -> None:
        """Takes a chunk's mean, or why there is none."""
        if not isinstance(found, Exception):
            torch._foreach_copy_(gradients, chunk.views(found))
        with self._lock:
            failed = isinstance(found, Exception) and self._left > 0
            self._left = 0 if failed else self._left - 1
            is_last = self._left == 0
        if isinstance(found, Exception):
            if failed:
                self._future.set_exception(found)  # type: ignore[arg-type]  # takes exceptions all the same
        elif is_last:
            self._future.set_result(self._buffer)
