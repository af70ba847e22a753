"""Counters that all ranks of a host see, and a wait that costs next to nothing.

    counters of rank 0   [ready 7] [done 6] [data 2] ...     one writer each, on a cache line of its own;
    counters of rank 1   [ready 6] [done 6] [data 2] ...     rank 0 waits here until it says 7

A waiting rank spins for some 30 microseconds, because on cores of their own ranks come within that time; a few times
only where there are more ranks than cores. Then it sleeps in the kernel on the word it waits for (futex) and is woken
by the one that writes it. MPI's libraries spin for ever, which makes N ranks on fewer cores slower than TCP; a sleep of
a fixed time would be too long on idle cores. Yielding the core between looks would give it away for a whole slice where
other processes compute: 25 MiB took 147 ms and not 55 beside two of them (gloo: 58).

Ten times a second a sleeping rank checks whether the others live, and names the one that does not.

A counter is written after the data that it announces. On x86-64 no processor sees these two in another order; others
may, and Python has no fence to stop them: `has_total_store_order` says where counters may be used. Sources: U. Drepper,
"Futexes Are Tricky", 2011; P. Sewell et al., "x86-TSO", CACM 2010.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.collectives.segments import process_alive
from samestep.errors import PeerError

READY, DONE, DATA, ACK = range(4)  # the counters of a rank
_CLOSED = 4
_LINE = 64  # bytes of a cache line: a rank that writes disturbs no reader of another's
_LINES = 6  # of a rank: its counters, whether it has closed, its data
_DATA_OFFSET = 5 * _LINE
_DATA = struct.Struct("=qq")
_WORDS = _LINE // 4

SPIN_COUNT, SPIN_COUNT_OVER_CORES = 100, 10  # before the first sleep
_CHECK_S = 0.1
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # of x86-64

_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
_TIMEOUT = struct.pack("=qq", 0, round(_CHECK_S * 1e9))


def has_total_store_order() -> bool:
    """Whether this processor shows its writes to others in the order in which they were made."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def length(ranks: int) -> int:
    """Returns the bytes of memory that the counters of so many ranks take."""
    return ranks * _LINES * _LINE


@dataclass(eq=False)
class SharedCounters:
    """The counters of some ranks of one host, each 0 at first."""

    memory: mmap.mmap  # shared by all of them; `length(ranks)` bytes
    rank: int  # this rank's place among them
    names: Sequence[int]  # what the ranks are called in errors, in the order of their places
    processes: Sequence[int]  # likewise their processes
    timeout_s: float
    purpose: str = "add gradients with"  # what they do together, in errors

    def __post_init__(self) -> None:
        self.size = len(self.names)
        self._spins = SPIN_COUNT if self.size <= len(os.sched_getaffinity(0)) else SPIN_COUNT_OVER_CORES
        self._words = memoryview(self.memory).cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._others = [place for place in range(self.size) if place != self.rank]
        self._exchanges = 0

    def publish(self, counter: int, value: int) -> None:
        """Sets a counter of this rank, and wakes the ranks that sleep on it."""
        word = self._word(self.rank, counter)
        self._words[word] = value & 0xFFFFFFFF
        _syscall(_FUTEX, self._address + 4 * word, _FUTEX_WAKE, self.size, None)

    def all_reached(self, counter: int, value: int) -> bool:
        """Whether all others have reached `value`, without waiting."""
        words = self._words
        return all(_has_reached(words[self._word(place, counter)], value) for place in self._others)

    def wait(self, counter: int, value: int) -> None:
        """Waits until all others have reached `value`."""
        for place in self._others:
            word = self._word(place, counter)
            for _ in range(self._spins):
                if _has_reached(self._words[word], value):
                    break
            else:
                self._sleep(place, word, value)

    def exchange(self, value: int, other: int = 0) -> list[tuple[int, int]]:
        """Returns two numbers of every rank. Collective: every rank of the counters must call it."""
        self._exchanges += 1
        _DATA.pack_into(self.memory, self.rank * _LINES * _LINE + _DATA_OFFSET, value, other)
        self.publish(DATA, self._exchanges)
        self.wait(DATA, self._exchanges)
        places = range(self.size)
        found = [_DATA.unpack_from(self.memory, place * _LINES * _LINE + _DATA_OFFSET) for place in places]
        self.publish(ACK, self._exchanges)
        self.wait(ACK, self._exchanges)  # nobody writes the next before all have read this one
        return found

    def close(self) -> None:
        """Tells the others that this rank has left."""
        self.publish(_CLOSED, 1)

    def _word(self, place: int, counter: int) -> int:
        return (place * _LINES + counter) * _WORDS

    def _sleep(self, place: int, word: int, value: int) -> None:
        began = time.monotonic()
        while not _has_reached(seen := self._words[word], value):
            gone = self._words[self._word(place, _CLOSED)] != 0 or not process_alive(self.processes[place])
            waited = time.monotonic() - began
            # once more: what a rank did before it left counts
            if (gone or waited > self.timeout_s) and not _has_reached(self._words[word], value):
                own, theirs = self.names[self.rank], f"rank {self.names[place]} (process {self.processes[place]})"
                if gone:
                    raise PeerError(f"{theirs} has left, and rank {own} waited to {self.purpose} it")
                raise PeerError(f"rank {own} waited {waited:.0f} s to {self.purpose} {theirs}")
            _syscall(_FUTEX, self._address + 4 * word, _FUTEX_WAIT, seen, _TIMEOUT)


def _has_reached(found: int, value: int) -> bool:
    """Whether a counter, which begins again after 2^32, has reached `value`."""
    return (found - value) & 0x80000000 == 0
