"""The latest of files that may be huge, or hostile: of a rank's events, and of what it printed.

    rankK.events.jsonl    begin, machine, …        64 KiB │ left out │ 256 KiB        the last steps, and what comes
    rankK.out, rankK.err                                  │ left out │  16 KiB        the last lines

A view that is started beside a run of a week begins as soon as one beside a run of a minute, and stays as small.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from samestep.events import MAX_LINE_BYTES as LONGEST_LINE
from samestep.events import Reader
from samestep.reporting.run_log import LOOK, Event, Run, open_run

HEAD, LAST = 64 << 10, 256 << 10  # bytes of events
TAIL = 16 << 10  # bytes of output
KEPT = 200  # events of a kind that stay in memory; of steps, fewer
LONGEST = 1_000  # letters of a line of output
_STEP = b'"kind":"step"'
_PIECES = re.compile(rb'"spans":\[.*?\],("more":\d+,)"buckets":\[[^"]*\],')
_OBEYED = re.compile(  # what a terminal obeys: CSI, OSC and their like, two-byte sequences
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]"
)


def open_latest(path: Path) -> Run:
    """Returns a run of whose ranks only the first and the last events are read; refuses what `open_run` refuses."""
    run = open_run(path, LatestReader)
    trim(run)
    return run


def trim(run: Run) -> None:
    """Drops what a live view shows no more."""
    for log in run.ranks.values():
        for events in (log.values, log.checkpoints, log.pipelines):
            del events[:-KEPT]
        del log.steps[: -2 * LOOK]
    del run.launcher_events[:-KEPT]


class LatestReader(Reader):
    """Reads a file's beginning and its end, and then what is appended; of many steps only the last, and in short."""

    def events(self) -> Iterator[Event]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            lines = self._new_lines(file)
        steps = [number for number, line in enumerate(lines) if _STEP in line[:200]]
        left_out = set(steps[1:-LOOK])
        for number, line in enumerate(lines):
            event = None if number in left_out else self._event(_PIECES.sub(rb'"spans":[],\1"buckets":[],', line))
            if event is not None:
                yield event

    def _new_lines(self, file: BinaryIO) -> list[bytes]:
        size = os.fstat(file.fileno()).st_size
        if size < self._read:
            self._read, self._rest = 0, b""  # it was begun anew
        file.seek(self._read)
        head: list[bytes] = []
        if size - self._read > HEAD + LAST:
            head = file.read(HEAD).split(b"\n")[:-1] if self._read == 0 else []
            file.seek(size - LAST)
            file.readline(LAST)  # the rest of a line
            self._rest = b""
        *lines, self._rest = (self._rest + file.read(HEAD + LAST)).split(b"\n")
        self._read = file.tell()
        if len(self._rest) > LONGEST_LINE:
            self.torn, self._rest = self.torn + 1, b""
        return head + lines


@dataclass
class LogTail:
    """The last lines of a file that may still be written; reads it only when it has changed."""

    path: Path
    lines: list[str] = field(default_factory=list)
    _stamp: tuple[int, int] | None = None

    def read(self) -> list[str]:
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            about = os.fstat(file)
            stamp = (about.st_size, about.st_mtime_ns)
            if stat.S_ISREG(about.st_mode) and stamp != self._stamp:
                self._stamp = stamp
                at = max(0, about.st_size - TAIL)
                self.lines = _shown(os.pread(file, TAIL, at), whole=at == 0)
        finally:
            os.close(file)
        return self.lines


def _shown(data: bytes, *, whole: bool) -> list[str]:
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    return [clean(line.decode(errors="replace")) for line in (lines if whole or len(lines) < 2 else lines[1:])]


def clean(line: str) -> str:
    r"""Returns a line of output as it would stand on a screen, with nothing in it that a terminal obeys.

    What a progress bar has drawn over with carriage returns goes, and so do colours.

    >>> clean("10%\r20%\r"), clean("\x1b[31mred\x1b[0m\ta\x07")
    ('20%', 'red a\\x07')
    """
    line = line[-20 * LONGEST :].rstrip("\r").rpartition("\r")[2]
    line = _OBEYED.sub("", line).expandtabs(4)[:LONGEST]
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
