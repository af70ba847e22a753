"""The one progress display of all recipes: live on a terminal, calm lines in a file, silence on the other ranks.

A bar that reads `loss.item()` at every step makes the host wait for the device at every step. Here the loss is
read only when something is about to be drawn: twice a second on a terminal, every few seconds in a file. Rates
count the samples of all ranks and leave out the time spent in evaluation.

    terminal    digits  epoch 3/12  ━━━━━━━╸━━━━━━━  52/276  loss 0.1034  9,214 samples/s  0:00:04
    file        digits: epoch 3/12  step 6/23  loss 0.1034  9,214 samples/s  eta 0:00:04
    both        digits: epoch 3/12  loss 0.0911  held-out accuracy 97.5 %  9,198 samples/s
                digits: 97.5 % of 360 held-out samples right, 12 epochs, 2 ranks, 6.1 s, checkpoints in runs/digits

Under `samestep run` it also says what share of the time the ranks wait, and for whom, if one stands out:

    file        digits: epoch 3/12  step 6/23  loss 0.1034  9,214 samples/s  waiting 31%  slowest rank 1 (1.4x)  eta …

A recipe that shows more hands over `columns`: name -> function that returns the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

import samestep

__all__ = ["ProgressDisplay", "percent", "print_rank0"]

LIVE_SECONDS = 0.5
LINE_SECONDS = 5.0


class ProgressDisplay:
    """Progress of one training, shown by rank 0.

    Args:
        name: the recipe, at the start of every line.
        world: only its first rank shows anything.
        batches: tells epoch, step and loss.
        epochs: how many there will be; 0 where nothing is trained.
        items: how many there are in an epoch, over all ranks.
        unit: what `items` counts, such as "samples" or "tokens".
        columns: more to show, name -> function returning text, called only when drawing; "" hides it.
        print_freq: in a file, a line every so many steps instead of every few seconds.
        console: where to draw; standard output by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        name: str,
        world: samestep.World,
        batches: samestep.Shards,
        *,
        epochs: int,
        items: int,
        unit: str = "samples",
        columns: Mapping[str, Callable[[], str]] | None = None,
        print_freq: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.world, self.batches, self.epochs, self.unit = name, world, batches, epochs, unit
        self.items_a_step = items / max(1, batches.steps_per_epoch)
        self.columns = {"loss": lambda: f"{float(batches.loss):.4f}", **(columns or {})}
        self.print_freq, self.clock = print_freq, clock
        self.console = console or plain_console()
        live = world.is_first and self.console.is_terminal
        self.live = live_bar(self.console) if live else None
        self.task: TaskID | None = None
        self.started = self.resumed = self.drawn = clock()
        self.busy = 0.0
        self.taken = 0  # steps since the start or the resumption
        self.epoch = self.at_step = 0

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
            self.task = self.live.add_task(self.name, total=None, text="")
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def begin(self, epoch: int) -> None:
        """Epoch `epoch` (from 0) starts, or goes on in its middle."""
        self.epoch, self.at_step = epoch, self.batches.step
        if self.taken == 0 and epoch + self.at_step > 0:
            self.note(f"goes on in {self.place} after step {self.at_step}/{self.batches.steps_per_epoch}")
        self.resumed = self.clock()

    def step(self) -> None:
        """A step has ended."""
        now = self.clock()
        self.busy += now - self.resumed
        self.resumed = now
        self.at_step += 1
        self.taken += 1
        if self.world.is_first and self.due():
            self.draw()
            self.drawn = now

    def result(self, **values: str) -> None:
        """The epoch is over; `values` are shown as `name value`, underscores as spaces."""
        if self.world.is_first:
            self.note("  ".join([self.place, *self.figures(), *spelled(values), self.pace]))
            self.move_bar()
            self.drawn = self.clock()

    def note(self, text: str) -> None:
        """One line that stays."""
        print_rank0(self.name, self.world, text, self.console)

    def summary(self, text: str, checkpoint: Path | None = None) -> None:
        """The last line: the result, what it took, and where it lies."""
        self.__exit__()
        took = self.clock() - self.started
        epochs = [plural(self.epochs, "epoch")] if self.epochs else []
        words = [text, *epochs, plural(self.world.size, "rank"), f"{took:.1f} s"]
        self.note(", ".join([*words, *([f"checkpoints in {checkpoint}"] if checkpoint else [])]))

    def due(self) -> bool:
        """Whether what is shown is old enough to be drawn again."""
        if self.live is None and self.print_freq is not None:
            return self.at_step % self.print_freq == 0
        return self.clock() - self.drawn >= (LINE_SECONDS if self.live is None else LIVE_SECONDS)

    def draw(self) -> None:
        """Moves the bar, or prints a line."""
        if self.live is not None:
            self.move_bar()
            return
        step = f"step {self.at_step}/{self.batches.steps_per_epoch}"
        self.note("  ".join([self.place, step, *self.figures(), self.pace, f"eta {self.remaining}"]))

    def move_bar(self) -> None:
        """Brings the bar, if there is one, to where the training is."""
        if self.live is None or self.task is None:
            return
        steps = self.batches.steps_per_epoch
        self.live.update(
            self.task,
            description=f"{self.name}  {self.place}",
            completed=self.epoch * steps + self.at_step,
            total=self.epochs * steps,
            text="  ".join([*self.figures(), self.pace]),
            refresh=True,
        )

    def figures(self) -> list[str]:
        """The loss and the recipe's own columns; reading them may wait for the device."""
        return spelled({name: read() for name, read in self.columns.items()}) if self.taken else []

    @property
    def place(self) -> str:
        """Which epoch of how many, counted from 1."""
        return f"epoch {self.epoch + 1}/{self.epochs}"

    @property
    def pace(self) -> str:
        """Such as `9,214 samples/s`: items of all ranks, by the seconds spent training; and how the ranks stand."""
        rate = f"{self.items_a_step * self.taken / self.busy:,.0f} {self.unit}/s" if self.busy > 0 else ""
        return "  ".join(filter(None, [rate, self.world.pace]))

    @property
    def remaining(self) -> timedelta:
        """How long the steps left take at the pace so far, evaluations left out."""
        left = (self.epochs - self.epoch) * self.batches.steps_per_epoch - self.at_step
        return timedelta(seconds=round(left * self.busy / max(1, self.taken)))


def print_rank0(name: str, world: samestep.World, text: str, console: Console | None = None) -> None:
    """One line, on rank 0."""
    if world.is_first:
        (console or plain_console()).print(f"{name}: {text}", markup=False)


def percent(share: float) -> str:
    """Such as `98.6 %`; never `100.0 %` for what is not all."""
    text = f"{100 * share:.1f}"
    return f"{100 * share:.3f} %" if text == "100.0" and share < 1 else f"{text} %"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def spelled(values: Mapping[str, str]) -> list[str]:
    """`{"held_out_loss": "0.3"}` -> `["held out loss 0.3"]`, without the empty ones."""
    return [f"{name.replace('_', ' ')} {value}" for name, value in values.items() if value]


def plain_console() -> Console:
    """Standard output; lines are neither wrapped nor coloured, so that a log stays searchable."""
    return Console(highlight=False, soft_wrap=True)


def live_bar(console: Console) -> Progress:
    """The columns of a terminal, left to right; drawn when a step says so, not by a thread."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
