"""All-reduce among the ranks of a process group that share a host, in shared memory.

Each rank announces beside its tensor what it adds, so that mismatched tensors end in an error on all ranks. gloo adds
what has the same length, whatever it is, and aborts the process where lengths differ.
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

from samestep.collectives import counters, shared_memory
from samestep.collectives.counters import SharedCounters
from samestep.collectives.segments import shared_segment
from samestep.errors import PeerError, StepError
from samestep.runtime.axis import HostMap
from samestep.runtime.hosts import group_by_host, process_identity
from samestep.runtime.store_messages import decode_message

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
SERVED: dict[str, tuple[torch.dtype, ...]] = {  # dtypes by operation, as torch's ReduceOp names it
    "sum": (*INTEGERS, *FLOATS, *COMPLEX),
    "avg": (*FLOATS, *COMPLEX),
    "product": (*INTEGERS, *FLOATS),
    "min": (*INTEGERS, *FLOATS),
    "max": (*INTEGERS, *FLOATS),
    "band": (*INTEGERS, torch.bool),
    "bor": (*INTEGERS, torch.bool),
    "bxor": (*INTEGERS, torch.bool),
}

_OPERATIONS = list(SERVED)
_DTYPES = [*INTEGERS, *FLOATS, *COMPLEX, torch.bool]
_LINE = 64  # bytes: a rank that writes disturbs no reader of another's
_ANNOUNCEMENT = struct.Struct("=qqhh")  # number, elements, operation, dtype


@dataclass(frozen=True)
class GroupInfo:
    rank: int  # its position in the group
    names: tuple[int, ...]  # the ranks' numbers in the world
    host_map: HostMap  # which ranks share a host
    timeout_s: float  # how long a rank waits for another

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks on each of several hosts, where these are equally many and consecutive in the group; else None."""
        each = len(self.host_map.hosts[0])
        in_line = tuple(tuple(range(first, first + each)) for first in range(0, self.size, each))
        return each if each < self.size and self.host_map.hosts == in_line else None


def gather_host_map(store: Store, rank: int, size: int) -> HostMap:
    """Returns which ranks share a host, through the group's store. Collective: every rank must call it."""
    return group_by_host(_all_gather(store, "process", process_identity(), rank, size, tuple[str | None, int]))


def _all_gather(store: Store, key: str, value: Any, rank: int, size: int, form: Any) -> list[Any]:
    store.set(f"{key}/{rank}", json.dumps(value))
    return [decode_message(store.get(f"{key}/{each}"), form, of=f"rank {each}'s {key}") for each in range(size)]


class SharedMemoryAllReduce:
    """The all-reduces of ranks of one host; all of them call the same ones in the same order."""

    def __init__(self, memory: mmap.mmap, info: GroupInfo) -> None:
        self._info = info
        self._counters = SharedCounters(memory, info.rank, info.names, info.host_map.processes, info.timeout_s)
        self._memory = shared_memory.SharedMemoryAllReduce(self._counters)
        self._announcements = memoryview(memory)[counters.length(info.size) :]
        self._number = 0

    @staticmethod
    def open(store: Store, info: GroupInfo) -> SharedMemoryAllReduce | None:
        """Opens memory that the ranks share; None on all of them if one cannot. Collective."""
        keys = iter(("memory", "seen"))  # of the store, one for each exchange

        def exchange(value: tuple[int, int]) -> list[Any]:
            return _all_gather(store, next(keys), value, info.rank, info.size, tuple[int, int])

        length = counters.length(info.size) + 2 * info.size * _LINE
        memory = shared_segment(length, leader=0, leads=info.rank == 0, exchange=exchange)
        return None if memory is None else SharedMemoryAllReduce(memory, info)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduces a tensor over the ranks, in place; on the CPU, of a dtype that `SERVED` has for `op`. Collective."""
        self._announce(tensor, op)
        values = tensor if tensor.numel() else tensor.new_zeros(1)  # a rank with an empty tensor takes part, too
        try:
            self._memory.all_reduce(values, *("sum", self._info.size) if op == "avg" else (op, 1))
        except PeerError:
            self._check_match()
            raise
        self._check_match()

    def _announce(self, tensor: Tensor, op: str) -> None:
        """Uses two lines in turn: no rank begins the next call but one before all have looked at this one."""
        self._number += 1
        what = _OPERATIONS.index(op), _DTYPES.index(tensor.dtype)
        _ANNOUNCEMENT.pack_into(self._announcements, self._line(self._info.rank), self._number, tensor.numel(), *what)

    def _check_match(self) -> None:
        """Leaves if the tensors do not match: a rank with a longer one still waits for the rest."""
        found = [_ANNOUNCEMENT.unpack_from(self._announcements, self._line(rank)) for rank in range(self._info.size)]
        here = {rank: what for rank, (number, *what) in enumerate(found) if number == self._number}
        if len(set(map(tuple, here.values()))) > 1:
            self.leave()
            listed = "; ".join(f"rank {self._info.names[rank]}: {_describe(*what)}" for rank, what in here.items())
            raise StepError(
                f"the ranks passed mismatched tensors to all-reduce {self._number} of their group: {listed}"
            )

    def _line(self, rank: int) -> int:
        return (2 * rank + self._number % 2) * _LINE

    def leave(self) -> None:
        self._counters.close()


def _describe(elements: int, op: int, dtype: int) -> str:
    return f"{_OPERATIONS[op]} of {elements} x {str(_DTYPES[dtype]).removeprefix('torch.')}"
