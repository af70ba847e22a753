"""How far each rank of a host has come: counters that all of them see, and a wait that costs next to nothing.

    word of rank 0   [ready 7] [done 6] [note 2] ...     one writer each, on a cache line of its own;
    word of rank 1   [ready 6] [done 6] [note 2] ...     rank 0 waits here until it says 7

A waiting rank looks again and again for some 30 microseconds, because on cores of their own ranks come within that
time; a few times only where there are more ranks than cores. Then it sleeps in the kernel on the word it waits for
(futex) and is woken by the one that writes it. MPI's libraries look for ever, which makes N ranks on fewer cores slower
than TCP; a sleep of a fixed time would be too long on idle cores. Yielding the core between looks would give it away
for a whole slice where other processes compute: 25 MiB took 147 ms and not 55 beside two of them (gloo: 58).

Ten times a second a sleeping rank looks whether the others live, and names the one that does not.

A counter is written after the data that it announces. On x86-64 no processor sees these two in another order; others
may, and Python has no fence to stop them: `has_total_store_order` says where a board may be used. Sources: U. Drepper,
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

from samestep.collectives.memory import process_alive
from samestep.errors import PeerError

__all__: list[str] = []

READY, DONE, NOTE, READ = range(4)  # the counters of a rank
_LEFT = 4
_LINE = 64  # bytes that a processor moves at once: a rank that writes disturbs no reader of another's
_LINES = 6  # of a rank: its counters, whether it has left, its note
_NOTE_AT = 5 * _LINE
_NOTE = struct.Struct("=qq")
_WORDS = _LINE // 4

_LOOKS, _FEW_LOOKS = 100, 10  # before the first sleep
_LOOK_AROUND_S = 0.1
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # of x86-64

_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
_PAUSE = struct.pack("=qq", 0, round(_LOOK_AROUND_S * 1e9))


def has_total_store_order() -> bool:
    """Whether this processor shows its writes to others in the order in which they were made."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def length(ranks: int) -> int:
    """Returns the bytes that a board for so many ranks takes."""
    return ranks * _LINES * _LINE


class SharedCounters:
    """The counters of some ranks of one host, each 0 at first.

    Args:
        memory: shared by all of them; `length(ranks)` bytes.
        rank: this rank's place on the board.
        names: what the ranks are called in errors, in the order of their places.
        processes: their process numbers.
        timeout_s: the longest wait.
        together: what they do, in errors.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        names: Sequence[int],
        processes: Sequence[int],
        timeout_s: float,
        *,
        together: str = "add gradients with",
    ) -> None:
        self.rank = rank
        self.size = len(names)
        self.names = names
        self.processes = processes
        self.timeout_s = timeout_s
        self._together = together
        self._looks = _LOOKS if self.size <= len(os.sched_getaffinity(0)) else _FEW_LOOKS
        self._memory = memory
        self._words = memoryview(memory).cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._others = [place for place in range(self.size) if place != rank]
        self._notes = 0

    def post(self, counter: int, value: int) -> None:
        """Tells the others that this rank has come to `value`, and wakes whoever sleeps on it."""
        word = self._word(self.rank, counter)
        self._words[word] = value & 0xFFFFFFFF
        _syscall(_FUTEX, self._address + 4 * word, _FUTEX_WAKE, self.size, None)

    def have_reached(self, counter: int, value: int) -> bool:
        """Whether all others have come to `value`, without waiting."""
        words = self._words
        return all(_is_past(words[self._word(place, counter)], value) for place in self._others)

    def wait(self, counter: int, value: int) -> None:
        """Waits until all others have come to `value`.

        Raises:
            PeerError: one of them is gone, or did not come in time.
        """
        for place in self._others:
            word = self._word(place, counter)
            for _ in range(self._looks):
                if _is_past(self._words[word], value):
                    break
            else:
                self._sleep(place, word, value)

    def exchange(self, value: int, other: int = 0) -> list[tuple[int, int]]:
        """Returns two numbers of every rank. Collective: every rank of the board must call it."""
        self._notes += 1
        _NOTE.pack_into(self._memory, self._start(self.rank) + _NOTE_AT, value, other)
        self.post(NOTE, self._notes)
        self.wait(NOTE, self._notes)
        found = [_NOTE.unpack_from(self._memory, self._start(place) + _NOTE_AT) for place in range(self.size)]
        self.post(READ, self._notes)
        self.wait(READ, self._notes)  # nobody writes the next before all have read this one
        return found

    def leave(self) -> None:
        """Tells the others that this rank will not come any more."""
        self.post(_LEFT, 1)

    def _start(self, place: int) -> int:
        return place * _LINES * _LINE

    def _word(self, place: int, counter: int) -> int:
        return (place * _LINES + counter) * _WORDS

    def _sleep(self, place: int, word: int, value: int) -> None:
        began = time.monotonic()
        while not _is_past(seen := self._words[word], value):
            gone = self._words[self._word(place, _LEFT)] != 0 or not process_alive(self.processes[place])
            waited = time.monotonic() - began
            if (gone or waited > self.timeout_s) and not _is_past(self._words[word], value):
                raise PeerError(self._complaint(place, waited, gone=gone))
            _syscall(_FUTEX, self._address + 4 * word, _FUTEX_WAIT, seen, _PAUSE)

    def _complaint(self, place: int, waited_s: float, *, gone: bool) -> str:
        mine, theirs = self.names[self.rank], f"rank {self.names[place]} (process {self.processes[place]})"
        if gone:
            return f"{theirs} has left, and rank {mine} waited to {self._together} it"
        return f"rank {mine} waited {waited_s:.0f} s to {self._together} {theirs}"


def _is_past(found: int, value: int) -> bool:
    """Whether a counter that begins again after 2^32 has come to `value`."""
    return (found - value) & 0x80000000 == 0
