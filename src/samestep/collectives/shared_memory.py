"""All-reduce among the ranks of one host, in the memory where the gradients are.

gloo sends them through TCP: every byte is copied into the kernel and out of it, twice. Here a tensor is moved into
shared memory once, and stays there; each rank then adds its share of it directly from the others' and writes the sum
back to all of them. Two passes over the memory, less is not possible:

    rank 0's tensor   [ 0 | 0 ]     1  both are READY           rank 0 adds the left half of both in rank order,
    rank 1's tensor   [ 1 | 1 ]     2  each adds its share      and writes the sum into both; rank 1 the right half
                      [01 | 01]     3  both are DONE

Each element is added by one rank, in the order of the ranks, wherever it is: all hold the same bits, and the bits do
not depend on how gradients are put into buckets, as gloo's and NCCL's do. No rank waits between 1 and 3: what is not
ready yet is added later, by `poll`, or at last by `wait_all`.

A tensor that is not registered costs a copy [4]: a piece at a time, through two halves of a staging buffer by turns,
which stay in the processors' cache.

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.collectives.counters import DONE, READY, SharedCounters
from samestep.collectives.segments import open_segment, shared_segment
from samestep.errors import StepError

SHARED_MEMORY = "/dev/shm"  # noqa: S108  (where torch makes shared storages; they have no name for longer than that)
BLOCK = 1 << 19  # bytes of all ranks' blocks together: half of a core's own cache
ALIGNMENT = 64  # bytes: no two ranks write to one cache line
RESERVE = 1 << 22  # bytes of /dev/shm that are left to others
PIECE = 1 << 19  # bytes of a tensor that is not registered that are staged at once
PIECE_OVER_CORES = 1 << 22  # where ranks wait for cores

ReduceOp = Callable[[Tensor, Tensor], object]
REDUCE_OPS: dict[str, ReduceOp] = {
    "sum": lambda into, other: into.add_(other),
    "product": lambda into, other: into.mul_(other),
    "min": lambda into, other: torch.minimum(into, other, out=into),
    "max": lambda into, other: torch.maximum(into, other, out=into),
    "band": lambda into, other: into.bitwise_and_(other),
    "bor": lambda into, other: into.bitwise_or_(other),
    "bxor": lambda into, other: into.bitwise_xor_(other),
}
InterHost = Callable[[Tensor], dist.Work]  # begins to add a rank's share to those of the other hosts, in place


def share(elements: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns which elements of a tensor `rank` adds up: from, and up to but without."""
    unit = max(1, ALIGNMENT // element_bytes)
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


def addition_order(ranks: int, *, pairwise: bool) -> list[tuple[int, int]]:
    """Returns which part is added to which, in turn, until all are in the first.

    >>> addition_order(4, pairwise=False)  # ((0 + 1) + 2) + 3
    [(0, 1), (0, 2), (0, 3)]
    >>> addition_order(4, pairwise=True)  # (0 + 1) + (2 + 3), as topology.tree_sum
    [(0, 1), (2, 3), (0, 2)]
    """
    if not pairwise:
        return [(0, rank) for rank in range(1, ranks)]
    found, level = [], list(range(ranks))
    while len(level) > 1:
        found += list(zip(level[::2], level[1::2], strict=False))
        level = level[::2]
    return found


class RegisteredBuffer:
    """A tensor of each rank, equally long and of one dtype, all of them mapped by this rank.

    Args:
        parts: the ranks', 1-dim.
        rank: whose share is added here.
        pairwise: add neighbours first, as virtual ranks do, instead of one rank after another.
    """

    def __init__(self, parts: Sequence[Tensor], rank: int, *, pairwise: bool = False) -> None:
        self.address = parts[rank].data_ptr()
        self.parts = parts
        size = parts[0].element_size()
        begin, end = share(parts[0].numel(), size, len(parts), rank)
        step = max(1, BLOCK // len(parts) // size)
        self.first = parts[0][begin:end]
        self.blocks = [
            [part[at : min(at + step, end)] for part in parts] for at in range(begin, end, step)
        ]  # made once: to cut a view takes as long as a block of 8 KB
        self._order = addition_order(len(parts), pairwise=pairwise)
        self._divides_first = must_divide_first(parts[0])

    def reduce(self, op: ReduceOp, divisor: int) -> None:
        """Does `add` and `write` at once, block by block."""
        for block in self.blocks:
            self.add([block], op, divisor)
            self.write([block], divisor)

    def add(self, blocks: list[list[Tensor]], op: ReduceOp, divisor: int) -> None:
        """Adds this rank's share of all parts into that of the first; what may overflow is divided before."""
        for block in blocks:
            if self._divides_first:
                for part in block:
                    divide_(part, divisor)
            for into, other in self._order:
                op(block[into], block[other])

    def write(self, blocks: list[list[Tensor]], divisor: int) -> None:
        """Divides what was added, unless that is done, and writes it into all parts."""
        for first, *others in blocks:
            if not self._divides_first:
                divide_(first, divisor)
            for other in others:
                other.copy_(first)


class _Started(NamedTuple):
    number: int
    buffer: RegisteredBuffer
    op: ReduceOp
    divisor: int
    callback: Callable[[], None]


@dataclass
class SharedMemoryAllReduce:
    """The all-reduces of the ranks of one host; every rank starts the same ones, in the same order."""

    counters: SharedCounters  # of these ranks
    # adds shares over several hosts; None where there is but one. It must not wait: the rank that it would wait for
    # may need a rank of this host
    inter_host: InterHost | None = None
    _number: int = field(default=0, init=False)
    _started: deque[_Started] = field(default_factory=deque, init=False)
    _between_hosts: deque[tuple[_Started, dist.Work]] = field(default_factory=deque, init=False)
    _written: list[_Started] = field(default_factory=list, init=False)
    _staging: list[list[Tensor]] | None = field(default=None, init=False)

    def register(self, tensor: Tensor, *, pairwise: bool = False) -> RegisteredBuffer | None:
        """Moves a tensor's storage into shared memory, in place; None on all ranks where that is not possible.

        Collective: every rank of the counters must call it.

        Args:
            tensor: contiguous, on the CPU; of the same length and dtype on all ranks.
            pairwise: see :class:`RegisteredBuffer`.

        Raises:
            StepError: the ranks brought tensors of different length.
        """
        flat = tensor.detach().view(-1)
        storage: Any = flat.untyped_storage()
        sizes = self.counters.exchange(flat.numel() * flat.element_size(), storage.nbytes())
        free = self.counters.exchange(_free_bytes())
        if len({length for length, _ in sizes}) > 1:
            raise StepError(
                f"the ranks brought tensors of different length to one sum: {[length for length, _ in sizes]} bytes"
            )
        if not flat.numel():
            return RegisteredBuffer([flat] * self.counters.size, self.counters.rank)
        if min(room for room, _ in free) < sum(needed for _, needed in sizes):  # of all ranks, so that all agree
            return None
        descriptor, _ = storage._share_fd_cpu_()  # share_memory_ calls it, and does not return the descriptor
        offset = int(flat.storage_offset()) * flat.element_size()
        places = self.counters.exchange(descriptor, offset)
        parts = [
            flat if place == self.counters.rank else self._map(place, *places[place], sizes[place][1], flat)
            for place in range(self.counters.size)
        ]
        mapped = self.counters.exchange(int(None not in parts))
        if not all(good for good, _ in mapped):
            return None
        return RegisteredBuffer([part for part in parts if part is not None], self.counters.rank, pairwise=pairwise)

    def _map(self, place: int, descriptor: int, offset: int, length: int, like: Tensor) -> Tensor | None:
        memory = open_segment(self.counters.processes[place], descriptor, length)
        if memory is None:
            return None
        return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset)

    def start(
        self, buffer: RegisteredBuffer, op: str = "sum", divisor: int = 1, callback: Callable[[], None] = lambda: None
    ) -> None:
        """Begins an all-reduce of what is in `buffer` now, in place; `callback` is called by `wait_all`."""
        self._started.append(_Started(self.next_number(), buffer, REDUCE_OPS[op], divisor, callback))
        self.counters.publish(READY, self._number)

    def poll(self) -> None:
        """Adds what all ranks have ready; does not wait."""
        while self._started and self.counters.all_reached(READY, self._started[0].number):
            self._reduce(self._started.popleft())
        while self._between_hosts and self._between_hosts[0][1].is_completed():
            self._write(*self._between_hosts.popleft())

    def wait_all(self) -> None:
        """Waits until all that was started is done. Collective: every rank must call it."""
        while self._started:
            self.counters.wait(READY, self._started[0].number)
            self._reduce(self._started.popleft())
        while self._between_hosts:
            self._write(*self._between_hosts.popleft())
        self.counters.wait(DONE, self._number)
        finished, self._written = self._written, []
        for one in finished:
            one.callback()

    def _reduce(self, one: _Started) -> None:
        if self.inter_host is None:
            one.buffer.reduce(one.op, one.divisor)
            self._note_written(one)
        else:
            one.buffer.add(one.buffer.blocks, one.op, one.divisor)
            self._between_hosts.append((one, self.inter_host(one.buffer.first)))

    def _write(self, one: _Started, work: dist.Work) -> None:
        work.wait()
        one.buffer.write(one.buffer.blocks, one.divisor)
        self._note_written(one)

    def _note_written(self, one: _Started) -> None:
        self.counters.publish(DONE, one.number)
        self._written.append(one)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def all_reduce(self, tensor: Tensor, op: str = "sum", divisor: int = 1) -> None:
        """Adds any tensor over the ranks, in place. Collective: every rank must call it.

        Args:
            tensor: on the CPU; of the same shape and dtype on all ranks.
            op: "sum", "product", "min", "max", "band", "bor" or "bxor".
            divisor: what the result is divided by.
        """
        self.wait_all()
        if self._staging is None:
            self._staging = self._open_staging()
        flat = tensor.detach().reshape(-1)
        step = self._staging[0][0].numel() // flat.element_size()
        for begin in range(0, flat.numel(), step):
            piece = flat[begin : begin + step]
            number = self.next_number()
            # a half is written again only after all ranks have finished the piece in the other half
            slots = [slot[: piece.nbytes].view(piece.dtype) for slot in self._staging[number % 2]]
            slots[self.counters.rank].copy_(piece)
            self.counters.publish(READY, number)
            self.counters.wait(READY, number)
            piece.copy_(slots[0])
            for slot in slots[1:]:
                REDUCE_OPS[op](piece, slot)
            divide_(piece, divisor)
            self.counters.publish(DONE, number)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def _open_staging(self) -> list[list[Tensor]]:
        """Returns memory for [4]: of each half the slots of all ranks, [bytes]. Collective."""
        counters = self.counters
        crowded = counters.size > len(os.sched_getaffinity(0))
        length = 2 * counters.size * (PIECE_OVER_CORES if crowded else PIECE)
        memory = shared_segment(
            length, leader=0, leads=counters.rank == 0, exchange=lambda value: counters.exchange(*value)
        )
        if memory is None:
            raise StepError("the ranks of this host cannot see each other's memory: use reduce='gloo'")
        return [list(half) for half in torch.frombuffer(memory, dtype=torch.uint8).view(2, counters.size, -1)]


def is_shared(tensor: Tensor) -> bool:
    shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return shared


def _free_bytes() -> int:
    """Returns how many bytes /dev/shm has left for gradients; 0 where there is none."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return max(0, state.f_bavail * state.f_frsize - RESERVE)
