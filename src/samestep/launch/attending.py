r"""Between the ranks of a call and the person who waits for it: passes on what they print, and says how far they are.

    the caller's stream                                          a rank's stream
    the process's own 1 or 2, and no status drawn there          the same, inherited: bytes as they come
    a notebook's cell, a string, a terminal with a status        a pipe, of which whole lines are passed on:
                                                                 [rank 1] …, and once where all say the same

What a line held before a carriage return is not passed on, so a tqdm bar is one line when it is finished, and stands
below the status until then. multiprocessing knows nothing of notebooks: there a child's lines go to wherever
descriptor 1 of the kernel leads, in some front ends to the terminal of the server.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TextIO

from samestep import progress
from samestep.launch.console import CHUNK, overwritten
from samestep.launch.folding import HOLD, Folder, label
from samestep.launch.status import Status, place_of, surface

__all__: list[str] = []

UP = b"\x1b[A"  # by which nested bars come back to the first of them


@dataclass(frozen=True)
class Means:
    """What a rank is started with: its streams, None to inherit one, and its progress record."""

    stdout: int | None = None
    stderr: int | None = None
    record: int | None = None


class Outlet:
    """One of the caller's streams. What cannot be written any more is dropped: no reason to end a training.

    Args:
        stream: where the lines go.
        size: how many ranks there are; a single one's lines get no label.
    """

    def __init__(self, stream: TextIO, size: int) -> None:
        self._stream, self._single = stream, size == 1
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._ripe: list[bytes] = []
        self._folder = Folder(size, 0.0 if size == 1 or place_of(stream) is None else HOLD)

    def feed(self, rank: int, line: bytes) -> None:
        """Takes one line of a rank."""
        now = time.monotonic()
        self._folder.feed(rank, line, now)
        self._ripe += self._folder.take(now)  # before the next: where nothing is held back, nothing is folded

    def take(self, *, everything: bool = False) -> list[bytes]:
        """Returns the lines that are to be written now."""
        lines = self._ripe + self._folder.take(time.monotonic(), everything=everything)
        self._ripe = []
        return [line.removeprefix(label({0}, 1) + b" ") for line in lines] if self._single else lines

    def due(self) -> float | None:
        """Returns when the next line is to be written, unless more comes; None where none waits."""
        return self._folder.due()

    def write(self, lines: list[bytes]) -> None:
        """Writes whole lines."""
        text = b"".join(line + b"\n" for line in lines).decode("utf-8", "replace")
        with contextlib.suppress(OSError, ValueError):  # its reader has gone, or it is closed
            self._stream.write(text.encode(self._encoding, "replace").decode(self._encoding))
            self._stream.flush()


@dataclass
class _Voice:
    """One stream of one rank."""

    rank: int
    outlet: Outlet
    held: bytes = b""

    def feed(self, data: bytes) -> None:
        *lines, rest = (self.held + data).split(b"\n")
        self.held = _last_drawn(rest)
        if len(self.held) >= CHUNK or (self.held and not data):
            lines.append(self.held)
            self.held = b""
        for line in map(overwritten, lines):
            if UP not in line:
                self.outlet.feed(self.rank, line)

    def bar(self) -> str | None:
        """Returns what the rank draws with carriage returns at the moment."""
        if b"\r" not in self.held:
            return None
        return overwritten(self.held).replace(UP, b"").decode("utf-8", "replace").rstrip() or None


def _last_drawn(rest: bytes) -> bytes:
    r"""Returns an unfinished line without what has been drawn over; a bar may go on for days.

    >>> _last_drawn(b"10 %\r20 %\r30 %"), _last_drawn(b"10 %\r20 %\r"), _last_drawn(b"loss")
    (b'\r30 %', b'\r20 %\r', b'loss')
    """
    drawn = rest.rstrip(b"\r")
    _, back, last = drawn.rpartition(b"\r")
    return back + last + rest[len(drawn) :]


@dataclass
class OutputForwarder:
    """Attends a pool of ranks; without streams and status it only waits.

    Args:
        size: how many ranks there are.
        streams: the caller's own by number, 1 or 2, that ranks do not inherit.
        status: what is drawn meanwhile, if anything.
    """

    size: int
    streams: Mapping[int, TextIO] = field(default_factory=dict)
    status: Status | None = None
    returned: int = 0

    def __post_init__(self) -> None:
        self._outlets = {number: Outlet(stream, self.size) for number, stream in self.streams.items()}
        self._voices: dict[int, _Voice] = {}  # by the descriptor that they are heard on
        self._records: list[int] = []

    @contextlib.contextmanager
    def admit(self, rank: int) -> Iterator[Means]:
        """Yields what a rank is to be started with meanwhile."""
        sinks = {number: self._listen(rank, number) for number in self._outlets}
        if self.status is not None:
            self._records.append(progress.create())
        try:
            yield Means(sinks.get(1), sinks.get(2), self._records[-1] if self._records else None)
        finally:
            for sink in sinks.values():
                os.close(sink)

    def _listen(self, rank: int, number: int) -> int:
        source, sink = os.pipe()
        os.set_blocking(source, False)
        self._voices[source] = _Voice(rank, self._outlets[number])
        return sink

    def wait(self, sources: Collection[int | Connection], deadline: float | None) -> set[int | Connection]:
        """Returns which of `sources` can be read or have ended; none when the deadline came first."""
        while True:
            ready: set[object] = set(wait([*sources, *self._voices], self._patience(deadline)))
            for descriptor in [descriptor for descriptor in self._voices if descriptor in ready]:
                self._hear(descriptor)
            self._show()
            found = {source for source in sources if source in ready}
            if found or (deadline is not None and time.monotonic() >= deadline):
                return found

    def _patience(self, deadline: float | None) -> float | None:
        """Returns how long nothing is to be done unless something happens."""
        drawing = None if self.status is None else self.status.due
        limits = [deadline, drawing, *(outlet.due() for outlet in self._outlets.values())]
        known = [limit for limit in limits if limit is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _hear(self, descriptor: int) -> bool:
        """Takes what a rank has written; returns whether there may be more."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        self._voices[descriptor].feed(data)
        if not data:
            self._hush(descriptor)
        return bool(data)

    def _hush(self, descriptor: int) -> None:
        del self._voices[descriptor]
        os.close(descriptor)

    def _show(self, *, everything: bool = False) -> None:
        lines = {outlet: outlet.take(everything=everything) for outlet in self._outlets.values()}
        if any(lines.values()):
            if self.status is not None:
                self.status.clear()
            for outlet, those in lines.items():
                if those:
                    outlet.write(those)
        if self.status is not None and not everything:
            self.status.draw(self.returned, self._records, self._bar())

    def _bar(self) -> str | None:
        for voice in sorted(self._voices.values(), key=lambda voice: voice.rank):
            bar = voice.bar()
            if bar is not None:
                return bar if self.size == 1 else f"[rank {voice.rank}] {bar}"
        return None

    def close(self) -> None:
        """Passes on what is left when all ranks have ended, and ends the status."""
        for descriptor, voice in list(self._voices.items()):
            self._hear(descriptor)  # once: a pipe holds no more, and something left behind may write for ever
            if descriptor in self._voices:
                voice.feed(b"")
                self._hush(descriptor)
        self._show(everything=True)
        if self.status is not None:
            self.status.close(self.returned, self._records)
            self.status = None
        while self._records:
            os.close(self._records.pop())


def attend(name: str, size: int, wanted: bool | None) -> OutputForwarder:
    """Returns who attends the call of a function by a person's program.

    Args:
        name: of the function.
        size: how many ranks there are.
        wanted: whether to draw a status; None where a person looks.
    """
    drawing = surface(wanted)
    own = {number: stream for number, stream in ((1, sys.stdout), (2, sys.stderr)) if stream is not None}
    passed = {
        number: stream
        for number, stream in own.items()
        if not _leads_to(stream, number) or (drawing is not None and place_of(stream) == "terminal")
    }
    return OutputForwarder(size, passed, None if drawing is None else Status(name, size, drawing))


def _leads_to(stream: TextIO, number: int) -> bool:
    """Tells whether what is written to a stream arrives where a descriptor leads."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.fstat(number))
    except (AttributeError, OSError, ValueError):  # no file at all, or a closed one
        return False
