"""Messages between two ranks of one host: one lays them down in memory that both see, the other takes them.

    rank 0   lays 1 2 3 ────▶  [ 1 | 2 | 3 |      ]   takes 1 2       each rank has memory in which it alone writes,
             takes 1    ◀────  [ 1 |              ]   lays 1  rank 1  and a ledger: which message lies where

A message costs one copy in and one out, and no thread of anybody's. gloo's goes through a socket, with a thread on
either side that takes the core from a computing stage: 0.38 ms to send and 0.25 to take 131 kB, between two ranks that
compute on two cores, where this takes 0.15 and 0.08, most of it for code and memory to come back into the caches
(means on a virtual machine, 2026-11-24, torch 2.13).

Nobody waits to lay something down: what does not fit into the memory goes to new memory, twice as large; when all has
been taken, the next message lies at the beginning again. So a rank has as much memory for what it sends as others have
not yet taken at once, and it is warm in the caches.

Messages are numbered through. A rank that gave up a step goes on with the numbers of the next one, and who waits for
what was never laid down is told so.
"""

from __future__ import annotations

import math
import mmap
import struct
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.collectives import board
from samestep.collectives.board import DONE, READY, SharedCounters, has_total_store_order
from samestep.collectives.memory import Segment, open_segment
from samestep.errors import PeerError, StepError
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.hosts import gather_host_map

__all__: list[str] = []

LINES = 1 << 13  # of a ledger: messages that may lie there; a plan of more could have both ranks wait to lay one down
LEAST = 1 << 20  # bytes of memory for messages
_LINE = struct.Struct("=qqqqq")  # number of the message; of the memory, its descriptor and length; begin in it
_ALIGNED = 64  # bytes
_TOGETHER = "exchange activations and gradients with"


class Shelf:
    """What lies between this rank and another.

    Args:
        memory: that both share, all zero at first; `length()` bytes.
        place: 0 or 1: which of the two this rank is.
        names: what they are called in errors.
        processes: their process numbers.
        timeout_s: the longest wait.
    """

    def __init__(
        self, memory: mmap.mmap, place: int, names: Sequence[int], processes: Sequence[int], timeout_s: float
    ) -> None:
        self._board = SharedCounters(memory, place, names, processes, timeout_s, together=_TOGETHER)
        begins = [board.length(2) + one * LINES * _LINE.size for one in (0, 1)]
        ledgers = [memoryview(memory)[begin : begin + LINES * _LINE.size] for begin in begins]
        self._mine, self._theirs = ledgers[place], ledgers[1 - place]
        self._other, self._process = names[1 - place], processes[1 - place]
        self._laid, self._taken = 0, 0
        self._laid_at_end, self._taken_at_end = 0, 0  # of the step
        self._before = 0, 0  # at the end of the one before it
        self._memories, self._unseen = 0, 0  # made; the first message in the last, until it has been taken
        self._own: list[Segment] = []  # that others may still open; the last is the one in use
        self._used = 0
        weakref.finalize(self, _close, self._own)
        self._opened = 0  # of the other's memories, by number
        self._from: mmap.mmap | None = None

    @staticmethod
    def length() -> int:
        """Returns the bytes of memory that a shelf takes, without the messages."""
        return board.length(2) + 2 * LINES * _LINE.size

    def begin(self, laid: int, taken: int) -> None:
        """A step begins; what one that failed has left is skipped.

        Args:
            laid: messages that this rank will lay down.
            taken: that it will take.
        """
        if self._laid != self._laid_at_end:
            self._laid = self._laid_at_end
            self._board.post(READY, self._laid)  # who still waits for what was never laid down finds it missing
        if self._taken != self._taken_at_end:
            self._taken = self._taken_at_end
            self._board.post(DONE, self._taken)
        self._before = self._laid_at_end, self._taken_at_end
        self._laid_at_end += laid
        self._taken_at_end += taken

    def withdraw(self) -> None:
        """The step that has begun will not be taken, by neither rank, and nothing has been laid down."""
        self._laid_at_end, self._taken_at_end = self._before

    def lay(self, tensors: Sequence[Tensor]) -> None:
        """Lays a message down, which may be overwritten when this returns.

        Raises:
            PeerError: the other rank is gone, and has not taken any of the last `LINES` messages.
        """
        number = self._laid + 1
        self._board.wait(DONE, number - LINES)
        size = sum(map(_aligned, tensors))
        to = begin = self._room(size)
        own = self._own[-1]
        for tensor in tensors:
            _tensor(own.map, to, tensor.dtype, tensor.shape).copy_(tensor)
            to += _aligned(tensor)
        self._used = to
        line = (number % LINES) * _LINE.size
        _LINE.pack_into(self._mine, line, number, self._memories, own.descriptor, len(own.map), begin)
        self._laid = number
        self._board.post(READY, number)

    def _room(self, size: int) -> int:
        """Returns where so many bytes have room; all that lies before it is still to be taken."""
        if self._board.have_reached(DONE, self._laid):
            self._used = 0
            while len(self._own) > 1:
                self._own.pop(0).close()
        length = len(self._own[-1].map) if self._own else 0
        if not length or self._used + size > length:
            self._own.append(Segment(max(LEAST, size, 2 * length)))
            self._memories, self._unseen = self._memories + 1, self._laid + 1
            self._used = 0
        return self._used

    def end(self) -> None:
        """A step is over; if memory was made in it, the other rank must have opened that: it dies with this process.

        Raises:
            PeerError: the other rank is gone.
        """
        if not self.is_seen:
            self._board.wait(DONE, self._unseen)
        self._unseen = 0

    @property
    def is_seen(self) -> bool:
        """Whether the other rank has opened all memory that there is."""
        return not self._unseen or self._board.have_reached(DONE, self._unseen)

    def take(self) -> Message:
        """Returns the next message, once it has been laid down; it lies there until it is `done`.

        Raises:
            PeerError: the other rank is gone, or did not come in time.
            StepError: it gave up the step.
        """
        number = self._taken + 1
        self._board.wait(READY, number)
        found, memory, descriptor, length, begin = _LINE.unpack_from(self._theirs, (number % LINES) * _LINE.size)
        if found != number:
            raise StepError(
                f"rank {self._other} aborted a pipeline step and started the next one before it had sent what this "
                "rank waits for: let its error end the run, or give up the step on every rank"
            )
        if memory != self._opened:
            self._opened, self._from = memory, open_segment(self._process, descriptor, length)
        if self._from is None:
            raise PeerError(f"the message buffer of rank {self._other} was closed")
        return Message(self, self._from, begin)

    def took(self) -> None:
        """The message may be overwritten."""
        self._taken += 1
        self._board.post(DONE, self._taken)

    def leave(self) -> None:
        """Tells the other rank that this one will not come any more, and lets go of the memory for messages.

        What lies there may still be taken: who has seen the memory keeps it.
        """
        self._board.leave()
        _close(self._own)


class Message:
    """One that has been laid down, read tensor by tensor.

    Args:
        shelf: on which it lies.
        memory: in which it lies.
        begin: where.
    """

    def __init__(self, shelf: Shelf, memory: mmap.mmap, begin: int) -> None:
        self._shelf = shelf
        self._memory = memory
        self._begin = begin

    def read(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Returns a copy of the next tensor."""
        tensor = _tensor(self._memory, self._begin, dtype, shape)
        self._begin += _aligned(tensor)
        return tensor.clone()

    def done(self) -> None:
        """All has been read."""
        self._shelf.took()


def _close(own: list[Segment]) -> None:
    while own:
        own.pop().close()


def _tensor(memory: mmap.mmap, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns the tensor that lies somewhere."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(shape)


def _aligned(tensor: Tensor) -> int:
    """Returns the bytes that a tensor takes with the gap behind it."""
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def shelves(axis: Axis, device: torch.device) -> dict[int, Shelf]:
    """Returns shelves between this rank and those before and behind it, by their positions, where they share a host.

    The first follows the last, as in a plan that deals stages in turn. Collective: every rank of the axis must call it.

    Args:
        axis: the ranks of a pipeline.
        device: of the tensors; all ranks' are of one type.
    """
    if axis.size == 1 or device.type != "cpu":
        return {}
    mine = axis.rank
    neighbours = gather_host_map(axis)
    around = (
        {(mine + way) % axis.size for way in (-1, 1)} & set(neighbours.same_host(mine))
        if has_total_store_order()
        else set()
    )
    own = {other: Segment(Shelf.length()) for other in around if mine < other}
    try:
        told = all_gather_json(axis, {str(other): one.place for other, one in own.items()})
        found = {other: one.map for other, one in own.items()}
        for other in around - own.keys():
            process, descriptor = told[other].get(str(mine), (0, 0))
            memory = open_segment(process, descriptor, Shelf.length())
            if memory is not None:
                found[other] = memory
        seen = all_gather_json(axis, sorted(found))
    finally:
        for one in own.values():
            one.close()
    ends: dict[int, Shelf] = {}
    for other in sorted(found):
        if mine in seen[other]:
            pair = sorted((mine, other))
            names, processes = ([of[each] for each in pair] for of in (axis.ranks, neighbours.processes))
            ends[other] = Shelf(found[other], pair.index(mine), names, processes, axis.timeout_s)
    return ends
