"""The ranks' output on one terminal, and each rank's own bytes in a file.

One rank, and rank 0 on a terminal, show bytes as they come. Else whole lines are shown, `[rank 1] …`; on standard error
and terminals, which people read, lines that several ranks print are merged.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from samestep.files import open_private
from samestep.launch.output.lines import MERGE_WINDOW_S, LineAssembler, LineMerger, strip_control
from samestep.paths import Stream, rank_file

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"  # what progress displays do to the cursor
SLICE = 1 << 14  # bytes whose lines are merged at a time
ATOMIC = 4096  # bytes that a pipe which can be written takes without waiting (PIPE_BUF)
MOST_HELD = 4 << 20  # bytes that wait for a slow reader before the ranks do
RETRY_S = 0.005  # until a slow reader is tried again


def say(text: str, *, plain: bool = False) -> None:
    """Writes a line of the launcher's own on standard error, as long as it has a reader."""
    if os.isatty(2):  # an exception's message may hold escape sequences
        text = "\n".join(strip_control(line.encode(errors="replace")).decode() for line in text.split("\n"))
    try:
        sys.stderr.write(text + "\n" if plain else f"samestep: {text}\n")
        sys.stderr.flush()
    except OSError:  # the reader is gone; the run goes on and keeps its exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else python fails once more at its end, with code 120


@dataclass
class Cursor:
    at_line_start: bool = True
    hidden: bool = False

    def follow(self, data: bytes) -> None:
        drawn = data.replace(HIDE, b"").replace(SHOW, b"")
        if drawn:
            self.at_line_start = drawn.endswith((b"\n", b"\r"))
        if HIDE in data or SHOW in data:
            self.hidden = data.rfind(HIDE) > data.rfind(SHOW)


@dataclass
class NonBlockingWriter:
    """One of the launcher's own two streams. What its reader does not take now is held; the launcher does not wait.

    What cannot be shown any more is dropped: the files have it all.
    """

    descriptor: int
    cursor: Cursor = field(default_factory=Cursor)
    gone: bool = False  # its reader
    held: bytearray = field(default_factory=bytearray)
    dropped: int = 0  # bytes

    def show(self, data: bytes) -> None:
        if not self.gone:
            self.held += data
            self.cursor.follow(data)
            self.flush()

    def flush(self, *, patient: bool = False) -> None:
        """Writes as much as the reader takes; `patient`: all of it, however long it takes."""
        while self.held and select.select([], [self.descriptor], [], None if patient else 0)[1]:
            try:
                del self.held[: os.write(self.descriptor, self.held[:ATOMIC])]
            except BlockingIOError:
                return
            except OSError:  # its reader has gone (`| head`): no reason to end a training
                self.gone = True
                self.held.clear()

    def drop(self, most: int) -> None:
        self.dropped += max(0, len(self.held) - most)
        del self.held[most:]

    def fit(self, line: bytes) -> bytes:
        return strip_control(line) if os.isatty(self.descriptor) else line

    def show_line(self, line: bytes) -> None:
        """Writes a whole line, on a line of its own even where a progress display has left the cursor elsewhere."""
        self.show((b"" if self.cursor.at_line_start else b"\n") + line + b"\n")

    def restore_terminal(self) -> None:
        """Leaves a terminal as it was found, even by a rank that was killed while it drew."""
        if not self.cursor.at_line_start:
            self.show(b"\n")
        if self.cursor.hidden:
            self.show(SHOW)

    def close(self) -> None:
        if self.dropped:
            self.show_line(f"samestep: {self.dropped} bytes are not shown here: see the logs".encode())
        if os.isatty(self.descriptor):
            self.restore_terminal()
        self.flush(patient=True)


@dataclass
class RankStream:
    """One stream of one rank, on its way to a writer and a file; bytes as they come where nothing merges them."""

    rank: int
    writer: NonBlockingWriter
    merger: LineMerger | None
    log: IO[bytes]
    full: bool = False  # the file takes nothing any more
    lines: LineAssembler = field(default_factory=LineAssembler)

    def feed(self, data: bytes) -> str | None:
        refused = None if self.full else self._keep(data)
        for start in range(0, len(data), SLICE):
            self._show(data[start : start + SLICE])
        return refused

    def _keep(self, data: bytes) -> str | None:
        left = memoryview(data)
        try:
            while left:
                left = left[self.log.write(left) :]
        except OSError as error:
            self.full = True
            return f"{error.strerror}: {self.log.name}"
        return None

    def _show(self, data: bytes) -> None:
        if self.merger is None:
            self.writer.show(data)
            return
        now = time.monotonic()
        for line in self.lines.feed(data):
            self.merger.feed(self.rank, self.writer.fit(line), now)

    def close(self) -> None:
        self._show(b"")
        self.log.close()


def open_writers() -> dict[Stream, NonBlockingWriter]:
    """Returns the launcher's own standard output and error; on one terminal they share its cursor."""
    cursor = Cursor()
    shared = os.isatty(1) and os.isatty(2)
    return {"out": NonBlockingWriter(1, cursor), "err": NonBlockingWriter(2, cursor if shared else Cursor())}


class Console:
    """All streams of all ranks of one attempt; `drawn` are those that rank 0 draws on a terminal."""

    def __init__(self, logs: Sequence[Path], drawn: Collection[str]) -> None:
        self._writers = open_writers()
        self._reported_reader = False
        self._mergers = {
            stream: LineMerger(len(logs), MERGE_WINDOW_S if stream == "err" or os.isatty(writer.descriptor) else 0.0)
            for stream, writer in self._writers.items()
        }
        self._streams: dict[tuple[int, str], RankStream] = {}
        self._logs = list(logs)
        for rank, folder in enumerate(logs):
            folder.mkdir(parents=True, exist_ok=True)
            for stream, writer in self._writers.items():
                merges = len(logs) > 1 and not (rank == 0 and stream in drawn)
                log = open_private(rank_file(folder, rank, stream), "wb", buffering=0)
                merger = self._mergers[stream] if merges else None
                self._streams[rank, stream] = RankStream(rank, writer, merger, log)

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        refused = self._streams[rank, stream].feed(data)
        if refused is not None:
            self._writers["err"].show_line(f"samestep: rank {rank}'s output is not kept any more: {refused}".encode())
        self.show()

    def tell(self, text: str) -> None:
        """Shows lines of the launcher's own, whatever the ranks have left on the screen."""
        writer = self._writers["err"]
        lines = f"samestep: {text}".encode(errors="backslashreplace").split(b"\n")
        writer.show_line(b"\n".join(map(writer.fit, lines)))  # it may hold a name, or a message, of the script's

    def keep_stacks(self, rank: int, stacks: bytes) -> None:
        path = rank_file(self._logs[rank], rank, "stacks")
        with suppress(OSError), open_private(path, "ab") as file:  # the disk is full, or the folder was cleared away
            file.write(stacks)

    @property
    def logs(self) -> str:
        """Where the files of all ranks are, as short as can be: "*" stands for the hosts, if there are several."""
        own = self._logs[0] if len(set(self._logs)) == 1 else self._logs[0].parent / "*"
        return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)

    def show(self, *, everything: bool = False) -> float | None:
        now = time.monotonic()
        for stream, merger in self._mergers.items():
            lines = merger.take(now, everything=everything)
            if lines:
                self._writers[stream].show_line(b"\n".join(lines))
            self._writers[stream].flush()
        if self._writers["out"].gone and not self._reported_reader:
            self._reported_reader = True  # a training goes on, and its user may not expect so
            self.tell(f"note: nobody reads standard output any more; the run goes on, its output is in {self.logs}")
        due = [due - now for merger in self._mergers.values() if (due := merger.due()) is not None]
        if self.backlog:
            due.append(RETRY_S)
        return max(0.0, min(due)) if due else None

    @property
    def backlog(self) -> int:
        return sum(len(writer.held) for writer in self._writers.values())

    def drop(self) -> None:
        for writer in self._writers.values():
            writer.drop(MOST_HELD // 16)

    def close(self) -> None:
        """Shows unfinished lines, closes the files and leaves the terminals as they were found."""
        for stream in self._streams.values():
            stream.close()
        self.show(everything=True)
        for writer in self._writers.values():
            writer.close()
