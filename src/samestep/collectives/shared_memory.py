"""All-reduce among the ranks of one host, in the memory where the gradients lie.

gloo sends them through TCP: every byte is copied into the kernel and out of it, twice. Here a tensor is moved into
shared memory once, and stays there; each rank then adds its share of it straight from the others' and writes the sum
back to all of them. Two passes over the memory, less is not possible:

    rank 0's tensor   [ 0 | 0 ]     1  both are READY           rank 0 adds the left half of both in rank order,
    rank 1's tensor   [ 1 | 1 ]     2  each adds its share      and writes the sum into both; rank 1 the right half
                      [01 | 01]     3  both are DONE

Each element is added by one rank, in the order of the ranks, wherever it lies: all hold the same bits, and the bits do
not depend on how gradients are put into buckets, as gloo's and NCCL's do. No rank waits between 1 and 3: what is not
ready yet is added later, by `advance`, or at last by `finish`.

A tensor that is not registered pays a copy [4]: through a piece of memory that stays in the processors' cache.

The sums are torch's own, block by block, so that a block is in the cache when it is scaled and written. Measured for
25 MiB and two ranks: 1.9 ms, of which Python takes 0.18; a kernel of our own would save no more than that.
Source: P. Patarasuk and X. Yuan, "Bandwidth Optimal All-reduce Algorithms", 2009, for what is the least to be moved;
DeepSpeed's and vLLM's all-reduce for inference do as [4].
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.collectives.board import DONE, READY, SharedCounters
from samestep.collectives.memory import open_segment, shared_segment
from samestep.errors import StepError

__all__: list[str] = []

SHARED_MEMORY = "/dev/shm"  # noqa: S108  (where torch makes shared storages; they have no name for longer than that)
BLOCK = 1 << 19  # bytes of all ranks' blocks together: half of a core's own cache
ALIGNED = 64  # bytes: no two ranks write to one cache line
SPARE = 1 << 22  # bytes of /dev/shm that are left to others
PIECE = 1 << 19  # bytes of a tensor that is not registered that travel at once
OVER_CORES = 1 << 22  # likewise, where ranks wait for cores

Fold = Callable[[Tensor, Tensor], object]
FOLDS: dict[str, Fold] = {
    "sum": lambda into, other: into.add_(other),
    "product": lambda into, other: into.mul_(other),
    "min": lambda into, other: torch.minimum(into, other, out=into),
    "max": lambda into, other: torch.maximum(into, other, out=into),
    "band": lambda into, other: into.bitwise_and_(other),
    "bor": lambda into, other: into.bitwise_or_(other),
    "bxor": lambda into, other: into.bitwise_xor_(other),
}
Across = Callable[[Tensor], dist.Work]  # begins to add a rank's share to those of the other hosts, in place


def share(elements: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns which elements of a tensor `rank` adds up: from, and up to but without."""
    unit = max(1, ALIGNED // element_bytes)
    units = -(-elements // unit)
    begin, end = rank * units // ranks, (rank + 1) * units // ranks
    return min(begin * unit, elements), min(end * unit, elements)


def divide_(total: Tensor, parts: int) -> None:
    """Divides a sum in place; by powers of two with a product, which gives the same bits in less time."""
    if parts & (parts - 1):
        total.div_(parts)
    elif parts > 1:
        total.mul_(1 / parts)


def must_divide_first(gradients: Tensor) -> bool:
    """Whether a sum may leave the range that its mean is in: float16 ends at 65504, and its parts are divided first."""
    return gradients.dtype == torch.float16


def pairs(ranks: int, *, by_tree: bool) -> list[tuple[int, int]]:
    """Returns which part is added to which, in turn, until all are in the first.

    >>> pairs(4, by_tree=False)  # ((0 + 1) + 2) + 3
    [(0, 1), (0, 2), (0, 3)]
    >>> pairs(4, by_tree=True)  # (0 + 1) + (2 + 3), as topology.tree_sum
    [(0, 1), (2, 3), (0, 2)]
    """
    if not by_tree:
        return [(0, rank) for rank in range(1, ranks)]
    found, level = [], list(range(ranks))
    while len(level) > 1:
        found += list(zip(level[::2], level[1::2], strict=False))
        level = level[::2]
    return found


class RegisteredBuffer:
    """A tensor of each rank, equally long and of one dtype, all of them in sight of this rank.

    Args:
        parts: the ranks', 1-dim.
        rank: whose share is added here.
        by_tree: add neighbours first, as virtual ranks do, instead of one rank after another.
    """

    def __init__(self, parts: Sequence[Tensor], rank: int, *, by_tree: bool = False) -> None:
        self.address = parts[rank].data_ptr()
        self.parts = parts
        size = parts[0].element_size()
        begin, end = share(parts[0].numel(), size, len(parts), rank)
        step = max(1, BLOCK // len(parts) // size)
        self.first = parts[0][begin:end]
        self.blocks = [
            [part[at : min(at + step, end)] for part in parts] for at in range(begin, end, step)
        ]  # made once: to cut a view takes as long as a block of 8 KB
        self._pairs = pairs(len(parts), by_tree=by_tree)
        self._divides_first = must_divide_first(parts[0])

    def reduce(self, fold: Fold, divisor: int) -> None:
        """Does `add` and `write` at once, block by block."""
        for block in self.blocks:
            self._add(block, fold, divisor)
            self._write(block, divisor)

    def add(self, fold: Fold, divisor: int) -> None:
        """Adds this rank's share of all parts into that of the first; what may overflow is divided before."""
        for block in self.blocks:
            self._add(block, fold, divisor)

    def write(self, divisor: int) -> None:
        """Divides what was added, unless that is done, and writes it into all parts."""
        for block in self.blocks:
            self._write(block, divisor)

    def _add(self, block: list[Tensor], fold: Fold, divisor: int) -> None:
        if self._divides_first:
            for part in block:
                divide_(part, divisor)
        for into, other in self._pairs:
            fold(block[into], block[other])

    def _write(self, block: list[Tensor], divisor: int) -> None:
        first, *others = block
        if not self._divides_first:
            divide_(first, divisor)
        for other in others:
            other.copy_(first)


@dataclass
class _Started:
    number: int
    region: RegisteredBuffer
    fold: Fold
    divisor: int
    then: Callable[[], None]
    travelling: dist.Work | None = None


@dataclass
class SharedMemoryAllReduce:
    """The all-reduces of the ranks of one host; every rank starts the same ones, in the same order.

    Args:
        board: of these ranks.
        across: adds shares over several hosts; None where there is but one. It must not wait: a rank of this host may
            be needed by the one that it would wait for.
    """

    board: SharedCounters
    across: Across | None = None
    _number: int = field(default=0, init=False)
    _started: deque[_Started] = field(default_factory=deque, init=False)
    _travelling: deque[_Started] = field(default_factory=deque, init=False)
    _written: list[_Started] = field(default_factory=list, init=False)
    _stage: _Stage | None = field(default=None, init=False)

    def register(self, tensor: Tensor, *, by_tree: bool = False) -> RegisteredBuffer | None:
        """Moves a tensor's storage into shared memory, in place; None on all ranks where it does not fit, or cannot.

        Collective: every rank of the board must call it.

        Args:
            tensor: contiguous, on the CPU; of the same length and dtype on all ranks.
            by_tree: see :class:`RegisteredBuffer`.

        Raises:
            StepError: the ranks brought tensors of different length.
        """
        flat = tensor.detach().view(-1)
        storage: Any = flat.untyped_storage()
        told = self.board.exchange(flat.numel() * flat.element_size(), storage.nbytes())
        rooms = self.board.exchange(_room())
        if len({length for length, _ in told}) > 1:
            raise StepError(
                f"the ranks brought tensors of different length to one sum: {[length for length, _ in told]} bytes"
            )
        if not flat.numel():
            return RegisteredBuffer([flat] * self.board.size, self.board.rank)
        if min(room for room, _ in rooms) < sum(wanted for _, wanted in told):
            return None
        descriptor, _ = storage._share_fd_cpu_()  # share_memory_ calls it, and does not tell where
        offset = int(flat.storage_offset()) * flat.element_size()
        places = self.board.exchange(descriptor, offset)
        parts = [
            flat if place == self.board.rank else self._seen(place, *places[place], told[place][1], flat)
            for place in range(self.board.size)
        ]
        seen = self.board.exchange(int(None not in parts))
        if not all(good for good, _ in seen):
            return None
        return RegisteredBuffer([part for part in parts if part is not None], self.board.rank, by_tree=by_tree)

    def _seen(self, place: int, descriptor: int, offset: int, length: int, like: Tensor) -> Tensor | None:
        memory = open_segment(self.board.processes[place], descriptor, length)
        if memory is None:
            return None
        return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset)

    def start(
        self, region: RegisteredBuffer, op: str = "sum", divisor: int = 1, then: Callable[[], None] = lambda: None
    ) -> None:
        """Begins an all-reduce of what lies in `region` now, in place; `then` is called by `finish`."""
        self._started.append(_Started(self.next_number(), region, FOLDS[op], divisor, then))
        self.board.post(READY, self._number)

    def advance(self) -> None:
        """Adds what all ranks have ready; does not wait."""
        while self._started and self.board.have_reached(READY, self._started[0].number):
            self._reduce(self._started.popleft())
        while self._travelling and _is_there(self._travelling[0]):
            self._write(self._travelling.popleft())

    def finish(self) -> None:
        """Waits until all that was started is done. Collective: every rank must call it.

        Raises:
            PeerError: a rank is gone.
        """
        while self._started:
            self.board.wait(READY, self._started[0].number)
            self._reduce(self._started.popleft())
        while self._travelling:
            self._write(self._travelling.popleft())
        self.board.wait(DONE, self._number)
        finished, self._written = self._written, []
        for one in finished:
            one.then()

    def _reduce(self, one: _Started) -> None:
        if self.across is None:
            one.region.reduce(one.fold, one.divisor)
            self._note_written(one)
        else:
            one.region.add(one.fold, one.divisor)
            one.travelling = self.across(one.region.first)
            self._travelling.append(one)

    def _write(self, one: _Started) -> None:
        if one.travelling is not None:
            one.travelling.wait()
        one.region.write(one.divisor)
        self._note_written(one)

    def _note_written(self, one: _Started) -> None:
        self.board.post(DONE, one.number)
        self._written.append(one)

    def next_number(self) -> int:
        """Returns the number of the next all-reduce."""
        self._number += 1
        return self._number

    def all_reduce(self, tensor: Tensor, op: str = "sum", divisor: int = 1) -> None:
        """Adds any tensor over the ranks, in place. Collective: every rank must call it.

        Args:
            tensor: on the CPU; of the same shape and dtype on all ranks.
            op: "sum", "product", "min", "max", "band", "bor" or "bxor".
            divisor: what the result is divided by.
        """
        self.finish()
        if self._stage is None:
            self._stage = _Stage.opened_by(self.board)
        flat = tensor.detach().reshape(-1)
        self._stage.all_reduce(self, flat, FOLDS[op], divisor)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))


class _Stage:
    """Memory through which tensors travel that are not registered, a piece at a time, in two halves by turns.

    [4] a rank copies its piece into its slot and waits for the others'; what it then reads stays, because nobody
    comes to the same half again before all have finished the piece between.
    """

    def __init__(self, memory: Any, ranks: int, rank: int) -> None:
        halves = torch.frombuffer(memory, dtype=torch.uint8).view(2, ranks, -1)
        self.slots = [[halves[half, place] for place in range(ranks)] for half in range(2)]
        self.rank = rank
        self.piece = halves.shape[2]

    @staticmethod
    def opened_by(board: SharedCounters) -> _Stage:
        """Returns the ranks' stage. Collective: every rank of the board must call it."""
        crowded = board.size > len(os.sched_getaffinity(0))
        length = 2 * board.size * (OVER_CORES if crowded else PIECE)
        memory = shared_segment(length, leader=0, leads=board.rank == 0, tell=lambda value: board.exchange(*value))
        if memory is None:
            raise StepError("the ranks of this host cannot see each other's memory: use reduce='gloo'")
        return _Stage(memory, board.size, board.rank)

    def all_reduce(self, shared: SharedMemoryAllReduce, flat: Tensor, fold: Fold, divisor: int) -> None:
        step = self.piece // flat.element_size()
        for begin in range(0, flat.numel(), step):
            self._reduce_piece(shared, flat[begin : begin + step], fold, divisor)

    def _reduce_piece(self, shared: SharedMemoryAllReduce, piece: Tensor, fold: Fold, divisor: int) -> None:
        number = shared.next_number()
        bytes_, board = piece.numel() * piece.element_size(), shared.board
        slots = [slot[:bytes_].view(piece.dtype) for slot in self.slots[number % 2]]
        slots[self.rank].copy_(piece)
        board.post(READY, number)
        board.wait(READY, number)
        piece.copy_(slots[0])
        for slot in slots[1:]:
            fold(piece, slot)
        divide_(piece, divisor)
        board.post(DONE, number)


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor has been moved into shared memory."""
    shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return shared


def _is_there(one: _Started) -> bool:
    return one.travelling is None or one.travelling.is_completed()


def _room() -> int:
    """Returns how many bytes /dev/shm has left for gradients; 0 where there is none."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return max(0, state.f_bavail * state.f_frsize - SPARE)
