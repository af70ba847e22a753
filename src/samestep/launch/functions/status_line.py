"""One line that says how far the ranks of a call are, drawn again in place, where a person looks.

    train  1 of 4 ranks returned  12 s  step 118 (rank 3) to 120 (rank 0)
    [rank 0]  45%|████▌     | 45/100         what a rank draws with carriage returns, such as a tqdm bar

    a notebook's cell    stays as one last line: an output cannot be taken back, and the time is worth knowing
    a terminal           goes when the call ends
    a file or a pipe     nothing; a plain line now and then, if it is asked for

rich.live needs ipywidgets to draw in a notebook; here the cell's output is updated by its display id, which every
front end understands.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TextIO

from samestep import progress
from samestep.rankenv import variable
from samestep.text import format_elapsed, plural

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

FIRST_S = 1.0  # before the first drawing: what is over by then needs none
PERIOD_S = 0.5  # between drawings
LOG_PERIOD_S = 30.0  # between lines in a file


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
