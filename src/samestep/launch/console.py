"""The ranks' output on one terminal, and each rank's own in a file.

    N = 1                      bytes as they come
    N > 1                      whole lines, `[rank 1] …`, each rank's lines in order; what several
                               ranks say stands there once (samestep.launch.folding): on standard error and on
                               terminals, which people read; programs read standard output, rank by rank
    rank 0 on a terminal       bytes as they come: its progress display draws with carriage returns and escapes
    lines on a terminal        without what would move its cursor, clear it or rename it

Standard output and standard error stay apart everywhere. The files keep every byte without a prefix. torchrun shows
all ranks' bytes mixed, even within a line, unless it is told to write files instead.
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
from samestep.launch.folding import HOLD, Folder
from samestep.launch.terminal import harmless, is_terminal
from samestep.paths import Stream, rank_file

__all__: list[str] = []

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"  # what progress displays do to the cursor
CHUNK = 1 << 16  # bytes; a line longer than this is shown in pieces
SLICE = 1 << 14  # bytes whose lines are folded at a time
ATOMIC = 4096  # bytes that a pipe which can be written takes without waiting (PIPE_BUF)
MOST_HELD = 4 << 20  # bytes that wait for a slow reader before the ranks do
AGAIN = 0.005  # seconds until a slow reader is tried again


@dataclass
class Cursor:
    """Where the cursor of a terminal, or the end of a file, stands."""

    at_line_start: bool = True
    hidden: bool = False

    def follow(self, data: bytes) -> None:
        """Takes note of what has been written."""
        drawn = data.replace(HIDE, b"").replace(SHOW, b"")
        if drawn:
            self.at_line_start = drawn.endswith((b"\n", b"\r"))
        if HIDE in data or SHOW in data:
            self.hidden = data.rfind(HIDE) > data.rfind(SHOW)


@dataclass
class Screen:
    """One of the launcher's own two streams. What its reader does not take now is held, and nobody waits for it.

    What cannot be shown any more is dropped: the files have it all.
    """

    descriptor: int
    cursor: Cursor = field(default_factory=Cursor)
    gone: bool = False  # its reader
    told: bool = False  # that it is
    held: bytearray = field(default_factory=bytearray)
    dropped: int = 0  # bytes

    def show(self, data: bytes) -> None:
        """Writes `data`, now or when the reader takes it."""
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
        """Forgets what is held beyond the first `most` bytes."""
        self.dropped += max(0, len(self.held) - most)
        del self.held[most:]

    def fit(self, line: bytes) -> bytes:
        """Returns somebody else's line as it may be shown here."""
        return harmless(line) if is_terminal(self.descriptor) else line

    def show_line(self, line: bytes) -> None:
        """Writes a whole line, on a line of its own even where a progress display has left the cursor elsewhere."""
        self.show((b"" if self.cursor.at_line_start else b"\n") + line + b"\n")

    def tidy(self) -> None:
        """Leaves a terminal as it was found, even by a rank that was killed while it drew."""
        if not self.cursor.at_line_start:
            self.show(b"\n")
        if self.cursor.hidden:
            self.show(SHOW)

    def close(self) -> None:
        """Waits until its reader has taken everything."""
        if self.dropped:
            self.show_line(f"samestep: {self.dropped} bytes are not shown here: see the logs".encode())
        if is_terminal(self.descriptor):
            self.tidy()
        self.flush(patient=True)


def say(text: str, *, plain: bool = False) -> None:
    """Writes a line of the launcher's own on standard error, as long as somebody reads it."""
    if is_terminal(2):  # an exception's message is somebody else's text
        text = "\n".join(harmless(line.encode(errors="replace")).decode() for line in text.split("\n"))
    try:
        sys.stderr.write(text + "\n" if plain else f"samestep: {text}\n")
        sys.stderr.flush()
    except OSError:  # whoever has read it is gone: the run and its exit code are not
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else python fails once more at its end, with code 120


def open_screens() -> dict[Stream, Screen]:
    """Returns the launcher's own standard output and error; on one terminal they share its cursor."""
    cursor = Cursor()
    shared = is_terminal(1) and is_terminal(2)
    return {"out": Screen(1, cursor), "err": Screen(2, cursor if shared else Cursor())}


@dataclass
class Channel:
    """One stream of one rank, on its way to a screen and a file."""

    rank: int
    screen: Screen
    folder: Folder | None
    log: IO[bytes]
    held: bytearray = field(default_factory=bytearray)

    full: bool = False  # the file takes nothing any more

    def feed(self, data: bytes) -> str | None:
        """Takes what the rank has written; returns why its file does not, where it has just begun not to."""
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
        if self.folder is None:
            self.screen.show(data)
            return
        self.held += data
        *lines, rest = self.held.split(b"\n")
        self.held = rest
        if len(rest) >= CHUNK or (rest and not data):
            lines.append(bytearray(rest))
            self.held = bytearray()
        now = time.monotonic()
        for line in lines:
            self.folder.feed(self.rank, self.screen.fit(overwritten(bytes(line))), now)

    def close(self) -> None:
        """Takes an unfinished last line and closes the file."""
        self._show(b"")
        self.log.close()


def overwritten(line: bytes) -> bytes:
    r"""Returns a line as it is shown: what a carriage return has overwritten is left out.

    >>> overwritten(b"50 %\r100 %")
    b'100 %'
    """
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Console:
    """All streams of all ranks of one attempt.

    Args:
        logs: the directory of each rank's files.
        drawn: the streams that rank 0 draws on a terminal.
    """

    def __init__(self, logs: Sequence[Path], drawn: Collection[str]) -> None:
        self._screens = open_screens()
        self._folders = {
            stream: Folder(len(logs), HOLD if stream == "err" or is_terminal(screen.descriptor) else 0.0)
            for stream, screen in self._screens.items()
        }
        self._channels: dict[tuple[int, str], Channel] = {}
        self._logs = list(logs)
        for rank, folder in enumerate(logs):
            folder.mkdir(parents=True, exist_ok=True)
            for stream, screen in self._screens.items():
                folds = len(logs) > 1 and not (rank == 0 and stream in drawn)
                log = open_private(rank_file(folder, rank, stream), "wb", buffering=0)
                self._channels[rank, stream] = Channel(rank, screen, self._folders[stream] if folds else None, log)

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Takes what a rank has written."""
        refused = self._channels[rank, stream].feed(data)
        if refused is not None:
            self._screens["err"].show_line(f"samestep: rank {rank}'s output is not kept any more: {refused}".encode())
        self.show()

    def tell(self, text: str) -> None:
        """Shows lines of the launcher's own, whatever the ranks have left on the screen."""
        screen = self._screens["err"]
        lines = f"samestep: {text}".encode(errors="backslashreplace").split(b"\n")
        screen.show_line(b"\n".join(map(screen.fit, lines)))  # it may hold a name, or a message, of the script's

    def keep_stacks(self, rank: int, stacks: bytes) -> None:
        """Adds the Python stacks of a rank to its file of them."""
        path = rank_file(self._logs[rank], rank, "stacks")
        with suppress(OSError), open_private(path, "ab") as file:  # the disk is full, or the folder was cleared away
            file.write(stacks)

    @property
    def logs(self) -> str:
        """Where the files of the first rank lie, as short as can be."""
        own = self._logs[0]
        return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)

    def show(self, *, everything: bool = False) -> float | None:
        """Shows the lines that need not wait for other ranks any more; returns in how many seconds to call it again."""
        now = time.monotonic()
        for stream, folder in self._folders.items():
            lines = folder.take(now, everything=everything)
            if lines:
                self._screens[stream].show_line(b"\n".join(lines))
            self._screens[stream].flush()
        self._tell_who_left()
        due = [due - now for folder in self._folders.values() if (due := folder.due()) is not None]
        if self.backlog:
            due.append(AGAIN)
        return max(0.0, min(due)) if due else None

    def _tell_who_left(self) -> None:
        """Says once that nobody reads standard output any more: a training goes on, and its user may not expect so."""
        out = self._screens["out"]
        if out.gone and not out.told:
            out.told = True
            self.tell(f"note: nobody reads standard output any more; the run goes on, its output is in {self.logs}")

    @property
    def backlog(self) -> int:
        """How many bytes wait for whoever reads the launcher's output."""
        return sum(len(screen.held) for screen in self._screens.values())

    def drop(self) -> None:
        """Forgets most of what a reader that has stopped has not taken."""
        for screen in self._screens.values():
            screen.drop(MOST_HELD // 16)

    def close(self) -> None:
        """Shows unfinished lines, closes the files and leaves the terminals as they were found."""
        for channel in self._channels.values():
            channel.close()
        self.show(everything=True)
        for screen in self._screens.values():
            screen.close()
