"""Forwards what the ranks of a call print to the caller's streams, and shows a status line meanwhile.

A rank inherits a stream that leads to descriptor 1 or 2 of this process. A notebook's cell, a string, or a terminal
with a status line gets whole lines through a pipe; of a line with carriage returns, as tqdm's bar has, the last state.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Literal, TextIO

from samestep import progress
from samestep.launch.output.lines import CHUNK, MERGE_WINDOW_S, LineAssembler, LineMerger, label, last_drawn
from samestep.rankenv import variable
from samestep.text import format_elapsed, plural

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

UP = b"\x1b[A"  # by which nested bars come back to the first of them
FIRST_S = 1.0  # before the first drawing: what is over by then needs none
PERIOD_S = 0.5  # between drawings
LOG_PERIOD_S = 30.0  # between lines in a file


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


# --- the status ------------------------------------------------------------------------------------


def place_of(stream: TextIO | None) -> Literal["cell", "terminal"] | None:
    """Returns where a person reads what is written to a stream, or None: a file, a pipe, a string."""
    if type(stream).__module__.partition(".")[0] == "ipykernel":
        return "cell"
    if stream is None or stream.closed or not stream.isatty():
        return None
    return None if variable("TERM") in {"dumb", "unknown"} else "terminal"


def display(wanted: bool | None) -> Display | None:
    """Returns where to draw: None wants it where a person looks, True anywhere, False nowhere."""
    place = None if wanted is False else place_of(sys.stdout)
    if place == "cell":
        return CellDisplay()
    if place == "terminal":
        return TerminalDisplay()
    return Display() if wanted else None


class Display:
    """Where the status is drawn; this one writes a plain line to standard error now and then."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def show(self, lines: Sequence[str]) -> None:
        if time.monotonic() - self._since >= LOG_PERIOD_S:
            self._since = time.monotonic()
            self.close(lines[0])

    def clear(self) -> bool:
        """Makes room for lines that others write; returns whether it must be drawn again after them."""
        return False

    def close(self, last: str) -> None:
        """Ends the drawing; `last` is what there is to say in the end."""
        sys.stderr.write(f"{last}\n")


class CellDisplay(Display):
    """Updates the cell's output by its display id, as every front end can; rich.live would need ipywidgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, lines: Sequence[str]) -> None:
        if self._handle is None:
            self._handle = import_module("IPython.display").display(_text(lines), display_id=True)
        else:
            self._handle.update(_text(lines))

    def close(self, last: str) -> None:
        if self._handle is not None:
            self.show([last])


class TerminalDisplay(Display):
    def __init__(self) -> None:
        self._live: Live | None = None

    def show(self, lines: Sequence[str]) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
        self._live.update(_text(lines))
        self._live.start()
        self._live.refresh()

    def clear(self) -> bool:
        if self._live is not None:
            self._live.stop()
        return self._live is not None

    def close(self, last: str) -> None:  # noqa: ARG002
        self.clear()


def _text(lines: Sequence[str]) -> Text:
    from rich.text import Text  # not before something is drawn

    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


class StatusLine:
    """What is known of a call that goes on, drawn at most twice a second."""

    def __init__(self, name: str, size: int, display: Display) -> None:
        self._name, self._size, self._display = name, size, display
        self._since = time.monotonic()
        self.due = self._since + FIRST_S
        self._drawn = False

    def draw(self, returned: int, records: Sequence[int], bar: str | None) -> None:
        """Draws, if it is time: `records` are the ranks' progress records, `bar` is what one of them draws."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + PERIOD_S
            self._drawn = True
            state = f"{returned} of {plural(self._size, 'rank')} returned"
            self._display.show([self._line(state, records), *([] if bar is None else [bar])])

    def clear(self) -> None:
        """Makes room for lines that others write; :meth:`draw` is to follow."""
        if self._drawn and self._display.clear():
            self.due = time.monotonic()

    def close(self, returned: int, records: Sequence[int]) -> None:
        """Says how it ended, unless it was over before there was anything to see."""
        if self._drawn:
            ranks = plural(self._size, "rank")
            state = f"{ranks} returned"
            if returned < self._size:
                state = f"stopped, {returned} of {ranks} had returned"
            self._display.close(self._line(state, records))

    def _line(self, state: str, records: Sequence[int]) -> str:
        took = format_elapsed(time.monotonic() - self._since)
        steps = range_of([progress.read(record).step for record in records])
        return "  ".join(filter(None, [self._name, state, took, steps]))


def range_of(steps: Sequence[int]) -> str:
    """Returns the steps of the slowest and the fastest rank; "" where none has taken any.

    >>> range_of([0, 0]), range_of([7, 7]), range_of([120, 119, 118])
    ('', 'step 7', 'step 118 (rank 2) to 120 (rank 0)')
    """
    slowest, fastest = min(steps, default=0), max(steps, default=0)
    if slowest == fastest:
        return f"step {fastest}" if fastest else ""
    return f"step {slowest} (rank {steps.index(slowest)}) to {fastest} (rank {steps.index(fastest)})"
