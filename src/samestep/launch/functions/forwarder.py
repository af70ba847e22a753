r"""Forwards what the ranks of a call print to the caller's streams, and says how far they are.

    the caller's stream                                          a rank's stream
    the process's own 1 or 2, and no status drawn there          the same, inherited: bytes as they come
    a notebook's cell, a string, a terminal with a status        a pipe, of which whole lines are passed on:
                                                                 [rank 1] …, and once where several say the same

What a line held before a carriage return is not passed on, so a tqdm bar is one line when it is finished, and is shown
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
from samestep.launch.functions.status_line import StatusLine, display, place_of
from samestep.launch.output.lines import CHUNK, MERGE_WINDOW_S, LineAssembler, LineMerger, label, last_drawn

UP = b"\x1b[A"  # by which nested bars come back to the first of them


class OutputStream:
    """One of the caller's streams. What cannot be written any more is dropped: no reason to end a training."""

    def __init__(self, stream: TextIO, size: int) -> None:
        self._stream, self._single = stream, size == 1
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._due: list[bytes] = []
        self._merger = LineMerger(size, 0.0 if size == 1 or place_of(stream) is None else MERGE_WINDOW_S)

    def feed(self, rank: int, line: bytes) -> None:
        now = time.monotonic()
        self._merger.feed(rank, line, now)
        self._due += self._merger.take(now)  # before the next: where nothing is held back, nothing is merged

    def take(self, *, everything: bool = False) -> list[bytes]:
        lines = self._due + self._merger.take(time.monotonic(), everything=everything)
        self._due = []
        return [line.removeprefix(label({0}, 1) + b" ") for line in lines] if self._single else lines

    def due(self) -> float | None:
        return self._merger.due()

    def write(self, lines: list[bytes]) -> None:
        text = b"".join(line + b"\n" for line in lines).decode("utf-8", "replace")
        with contextlib.suppress(OSError, ValueError):  # its reader has gone, or it is closed
            self._stream.write(text.encode(self._encoding, "replace").decode(self._encoding))
            self._stream.flush()


@dataclass
class LineReader:
    rank: int
    target: OutputStream
    lines: LineAssembler = field(default_factory=LineAssembler)

    def feed(self, data: bytes) -> None:
        for line in self.lines.feed(data):
            if UP not in line:
                self.target.feed(self.rank, line)

    def bar(self) -> str | None:
        if b"\r" not in self.lines.held:
            return None
        return last_drawn(self.lines.held).replace(UP, b"").decode("utf-8", "replace").rstrip() or None


@dataclass
class OutputForwarder:
    """Forwards the output of a pool of ranks; without streams and status it only waits.

    `streams` are the caller's own by number, 1 or 2, that ranks do not inherit.
    """

    size: int
    streams: Mapping[int, TextIO] = field(default_factory=dict)
    status: StatusLine | None = None
    returned: int = 0

    def __post_init__(self) -> None:
        self._targets = {number: OutputStream(stream, self.size) for number, stream in self.streams.items()}
        self._readers: dict[int, LineReader] = {}  # by descriptor
        self._records: list[int] = []

    @contextlib.contextmanager
    def open_streams(self, rank: int) -> Iterator[tuple[dict[str, int | None], int | None]]:
        """Yields what a rank is to be started with: its streams, None to inherit one, and its progress record."""
        sinks = {number: self._open_pipe(rank, number) for number in self._targets}
        if self.status is not None:
            self._records.append(progress.create())
        try:
            streams = {"stdout": sinks.get(1), "stderr": sinks.get(2)}
            yield streams, self._records[-1] if self._records else None
        finally:
            for sink in sinks.values():
                os.close(sink)

    def _open_pipe(self, rank: int, number: int) -> int:
        source, sink = os.pipe()
        os.set_blocking(source, False)
        self._readers[source] = LineReader(rank, self._targets[number])
        return sink

    def wait(self, sources: Collection[int | Connection], deadline: float | None) -> set[int | Connection]:
        """Returns which of `sources` can be read or have ended; none when the deadline came first."""
        while True:
            ready: set[object] = set(wait([*sources, *self._readers], self._timeout(deadline)))
            for descriptor in [descriptor for descriptor in self._readers if descriptor in ready]:
                self._read(descriptor)
            self._show()
            found = {source for source in sources if source in ready}
            if found or (deadline is not None and time.monotonic() >= deadline):
                return found

    def _timeout(self, deadline: float | None) -> float | None:
        drawing = None if self.status is None else self.status.due
        limits = [deadline, drawing, *(target.due() for target in self._targets.values())]
        known = [limit for limit in limits if limit is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return
        self._readers[descriptor].feed(data)
        if not data:
            self._close_reader(descriptor)

    def _close_reader(self, descriptor: int) -> None:
        del self._readers[descriptor]
        os.close(descriptor)

    def _show(self, *, everything: bool = False) -> None:
        lines = {target: target.take(everything=everything) for target in self._targets.values()}
        if any(lines.values()):
            if self.status is not None:
                self.status.clear()
            for target, those in lines.items():
                if those:
                    target.write(those)
        if self.status is not None and not everything:
            self.status.draw(self.returned, self._records, self._bar())

    def _bar(self) -> str | None:
        for reader in sorted(self._readers.values(), key=lambda reader: reader.rank):
            bar = reader.bar()
            if bar is not None:
                return bar if self.size == 1 else f"[rank {reader.rank}] {bar}"
        return None

    def close(self) -> None:
        """Passes on what is left when all ranks have ended, and ends the status."""
        for descriptor, reader in list(self._readers.items()):
            self._read(descriptor)  # once: a pipe holds no more, and something left behind may write for ever
            if descriptor in self._readers:
                reader.feed(b"")
                self._close_reader(descriptor)
        self._show(everything=True)
        if self.status is not None:
            self.status.close(self.returned, self._records)
            self.status = None
        while self._records:
            os.close(self._records.pop())


def open_forwarder(name: str, size: int, wanted: bool | None) -> OutputForwarder:
    """Returns what forwards the output of a function; `wanted`: whether to draw a status, None where a person looks."""
    shown = display(wanted)
    own = {number: stream for number, stream in ((1, sys.stdout), (2, sys.stderr)) if stream is not None}
    forwarded = {
        number: stream
        for number, stream in own.items()
        if not _leads_to(stream, number) or (shown is not None and place_of(stream) == "terminal")
    }
    return OutputForwarder(size, forwarded, None if shown is None else StatusLine(name, size, shown))


def _leads_to(stream: TextIO, number: int) -> bool:
    """Tells whether what is written to a stream arrives where a descriptor leads."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.fstat(number))
    except (AttributeError, OSError, ValueError):  # no file at all, or a closed one
        return False
