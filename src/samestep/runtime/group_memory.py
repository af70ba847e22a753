"""All-reduce among the ranks of a process group that all stand on one host: in shared memory.

Who is on which host the ranks tell each other through the group's store: there is no group to ask before it is made.

Each rank writes down beside its tensor what it brings [1], so that tensors that do not belong together end in an error
on all ranks [2]. gloo adds what has the same length, whatever it is, and aborts the process where the lengths differ.

    rank 0     brings 7: sum of 100 x float32       adds piece by piece     then reads what all have brought
    rank 1     brings 7: sum of 200 x float32       adds ... waits          rank 0 has left: reads it too
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from samestep.collectives import board
from samestep.collectives.board import SharedCounters
from samestep.collectives.memory import shared_segment
from samestep.collectives.shared_memory import SharedMemoryAllReduce
from samestep.errors import PeerError, StepError
from samestep.runtime.axes import Neighbours
from samestep.runtime.entries import decode_message
from samestep.runtime.neighbours import by_host, sight

__all__: list[str] = []

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
SERVED: dict[str, tuple[torch.dtype, ...]] = {  # the operations, by the names of torch's ReduceOp
    "sum": (*WHOLE, *FLOATS, *COMPLEX),
    "avg": (*FLOATS, *COMPLEX),
    "product": (*WHOLE, *FLOATS),
    "min": (*WHOLE, *FLOATS),
    "max": (*WHOLE, *FLOATS),
    "band": (*WHOLE, torch.bool),
    "bor": (*WHOLE, torch.bool),
    "bxor": (*WHOLE, torch.bool),
}

_OPERATIONS = list(SERVED)
_DTYPES = [*WHOLE, *FLOATS, *COMPLEX, torch.bool]
_LINE = 64  # bytes: a rank that writes disturbs no reader of another's
_BROUGHT = struct.Struct("=qqhh")  # number, elements, operation, dtype


@dataclass(frozen=True)
class Place:
    """A rank among those of its group.

    Attributes:
        rank: its position in the group.
        names: what the ranks are called: their global ranks.
        neighbours: who stands where.
        timeout_s: how long a rank waits for another.
    """

    rank: int
    names: tuple[int, ...]
    neighbours: Neighbours
    timeout_s: float

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.names)

    @property
    def local(self) -> int | None:
        """Ranks on each of several hosts, where they are as many on each, and neighbours in the group; else None."""
        each = len(self.neighbours.hosts[0])
        in_line = tuple(tuple(range(first, first + each)) for first in range(0, self.size, each))
        return each if each < self.size and self.neighbours.hosts == in_line else None


def meet(store: Store, rank: int, size: int) -> Neighbours:
    """Returns who stands where. Collective: every rank of the group must call it."""
    return by_host(_told(store, "sight", sight(), rank, size, tuple[str | None, int]))


def _told(store: Store, what: str, value: Any, rank: int, size: int, form: Any) -> list[Any]:
    """Returns every rank's `value`, in rank order; each must be of a form, since the store is open to others."""
    store.set(f"{what}/{rank}", json.dumps(value))
    return [decode_message(store.get(f"{what}/{each}"), form, of=f"rank {each}'s {what}") for each in range(size)]


class GroupMemory:
    """The all-reduces of ranks of one host; all of them call the same ones in the same order.

    Args:
        memory: that all of them share; `length(ranks)` bytes.
        place: of this rank.
    """

    def __init__(self, memory: mmap.mmap, place: Place) -> None:
        self._place = place
        self._board = SharedCounters(memory, place.rank, place.names, place.neighbours.processes, place.timeout_s)
        self._memory = SharedMemoryAllReduce(self._board)
        self._brought = memoryview(memory)[board.length(place.size) :]
        self._number = 0

    @staticmethod
    def length(ranks: int) -> int:
        """Returns the bytes that it takes."""
        return board.length(ranks) + 2 * ranks * _LINE

    @staticmethod
    def opened_by(store: Store, place: Place) -> GroupMemory | None:
        """Returns the ranks' shared memory; None on all of them if one cannot see it. Collective."""
        length = GroupMemory.length(place.size)
        questions = iter(("memory", "seen"))  # a key of the store for each

        def tell(value: tuple[int, int]) -> list[Any]:
            return _told(store, next(questions), value, place.rank, place.size, tuple[int, int])

        memory = shared_segment(length, leader=0, leads=place.rank == 0, tell=tell)
        return None if memory is None else GroupMemory(memory, place)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Adds a tensor over the ranks, in place. Collective.

        Args:
            tensor: on the CPU, of a dtype that `SERVED` has for `op`.
            op: one of `SERVED`.

        Raises:
            PeerError: a rank is gone.
            StepError: the ranks brought tensors that do not belong together.
        """
        self._bring(tensor, op)
        some = tensor if tensor.numel() else tensor.new_zeros(1)  # who brings nothing meets the others too
        try:
            self._memory.all_reduce(some, *("sum", self._place.size) if op == "avg" else (op, 1))
        except PeerError:
            self._compare()
            raise
        self._compare()

    def _bring(self, tensor: Tensor, op: str) -> None:
        """[1] Two lines by turns: nobody begins the next but one before all have looked at this one."""
        self._number += 1
        what = _OPERATIONS.index(op), _DTYPES.index(tensor.dtype)
        _BROUGHT.pack_into(self._brought, self._line(self._place.rank), self._number, tensor.numel(), *what)

    def _compare(self) -> None:
        """[2] Leaves if they do not belong together: whoever brought more still waits for the rest."""
        found = [_BROUGHT.unpack_from(self._brought, self._line(rank)) for rank in range(self._place.size)]
        here = {rank: what for rank, (number, *what) in enumerate(found) if number == self._number}
        if len(set(map(tuple, here.values()))) > 1:
            self.leave()
            said = "; ".join(f"rank {self._place.names[rank]}: {_said(*what)}" for rank, what in here.items())
            raise StepError(f"the ranks passed mismatched tensors to all-reduce {self._number} of their group: {said}")

    def _line(self, rank: int) -> int:
        return (2 * rank + self._number % 2) * _LINE

    def leave(self) -> None:
        """Tells the others that this rank will not come any more."""
        self._board.leave()


def _said(elements: int, op: int, dtype: int) -> str:
    return f"{_OPERATIONS[op]} of {elements} x {str(_DTYPES[dtype]).removeprefix('torch.')}"
