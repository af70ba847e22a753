"""The loop of a live view: read what is new, draw it, handle keys; twice a second."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from samestep.reporting.live.log_tail import LogTail, trim
from samestep.reporting.live.model import ViewState, WatchModel
from samestep.reporting.live.render import Marks, Renderer
from samestep.reporting.live.terminal import Terminal
from samestep.reporting.run_log import Run

PERIOD = 0.5  # seconds between two looks at a run that goes on; its ranks write as often
CALM = 2.0  # at one that is over: somebody may start it again


@dataclass
class WatchApp:
    run: Run  # is read again and again
    console: Console  # where it is shown
    choice: ViewState  # what is shown of it
    trouble: str = ""  # why it could not be read the last time; "" where it could
    _tail: LogTail | None = None
    _shown: Sequence[Text | None] = ()
    _size: tuple[int, int] = (0, 0)
    _now: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        encoding = (self.console.encoding or "").lower().replace("-", "")
        colours = self.console.color_system is not None and not self.console.no_color
        few = self.console.color_system == "standard"
        self.marks = Marks(colours=colours, few=few, ascii_only=not encoding.startswith("utf"))

    @property
    def model(self) -> WatchModel:
        """What there is to see; a pause stops the clock too."""
        return WatchModel(self.run, self.choice, self._now, self.trouble)

    def output(self, model: WatchModel) -> list[str]:
        path = model.output()
        if self._tail is None or self._tail.path != path:
            self._tail = LogTail(path)
        return self._tail.read()

    def once(self) -> None:
        model = self.model
        with self.console.capture() as page:  # rich would end the process where nobody reads
            renderer = Renderer(model, self.marks, self.console.width, is_live=False)
            for line in renderer.whole(self.output(model)):
                self.console.print(self._encoded(line), soft_wrap=True)
        self.console.file.write(page.get())
        self.console.file.flush()

    def live(self) -> int:
        """Shows it until somebody leaves; returns the exit code."""
        with Terminal(self.console) as terminal:
            while True:
                self._draw()
                due = time.monotonic() + (CALM if self.run.is_over else PERIOD)
                while (left := due - time.monotonic()) > 0:
                    for key in terminal.wait(left):
                        if not self._handle_key(key):
                            return 0
                        self._draw()
                    if terminal.ended_by is not None:
                        return 0 if terminal.ended_by == signal.SIGINT else 128 + terminal.ended_by
                if not self.choice.is_paused:
                    self._refresh()

    def _handle_key(self, key: str) -> bool:
        if not key:
            self._size = (0, 0)  # draws every line again
            return True
        return self.choice.handle_key(key, self.model)

    def _refresh(self) -> None:
        try:
            gone = not self.run.path.is_dir()
            self.trouble = f"{self.run.path} is gone: this is what was last read of it" if gone else ""
            if not gone:
                self.run.refresh()
        except OSError as error:
            self.trouble = f"{error.filename or self.run.path} cannot be read: {error.strerror}"
        trim(self.run)
        self._now = time.time()

    def _draw(self) -> None:
        model, (width, height) = self.model, self.console.size
        lines = Renderer(model, self.marks, width).screen(self.output(model), height)
        before = self._shown if self._size == (width, height) else [None] * height
        self._shown, self._size = lines, (width, height)
        with self.console:  # written at once
            for number, line in enumerate(lines):
                if line != before[number]:
                    drawn = self.console.render_lines(self._encoded(line), self.console.options.update(height=1))
                    self.console.update_screen_lines(drawn, 0, number)

    def _encoded(self, line: Text) -> Text:
        """A letter that the terminal's encoding lacks is a question mark."""
        if self.marks.ascii_only:
            line = line.copy()
            line.plain = line.plain.encode("ascii", "replace").decode()
        return line
