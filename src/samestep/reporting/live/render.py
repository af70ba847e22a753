"""A run as lines of a terminal of a given size.

runs/train-20260101-120000-1a2b  8 ranks on node1  train.py            running  3 min 05 s   1  title
step 256  24.2 ms a step  41.3 steps/s  9,214 samples/s  epoch 2                             2  figures
loss 0.1034 ▇▅▃▂▁  accuracy 0.97 ▁▃▆█                                                        3  values
  rank   step   a step  where the last steps went              at                            4  ranks: as many as
▸    0    256  24.2 ms  D F      B           W       O                                          fit, round the
     1    256  24.3 ms  D  F         B               O         slow                             chosen one
 D data  F forward  B backward  W wait …                                                     5  legend
── events ─────────────────────────────────                                           6  the last few
12:03:04  straggler  rank 1 is slow: its own work takes 24 ms a step, …
── rank 0, standard output ── 0/node1/rank0.out ──                                           7  what is left
…
 q quit  ↑↓ rank  Tab stderr  f events …                                                     8  keys

A phase is a letter on a ground of its own; without colours it is a letter alone, and with 16 colours both. The grounds
are Okabe and Ito's, which the colour-blind tell apart (https://jfly.uni-koeln.de/color, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from samestep.reporting.live.model import KEYS, Row, Value, WatchModel, path_as_said
from samestep.reporting.run_log import largest_remainder
from samestep.reporting.status import Level, RunEvent, run_status, took
from samestep.text import escape_control, format_duration, format_elapsed


class Mark(NamedTuple):
    symbol: str
    ink: str
    ground: str


PHASES = {
    "data": Mark("D", "#000000", "#e69f00"),
    "forward": Mark("F", "#000000", "#56b4e9"),
    "backward": Mark("B", "#ffffff", "#0072b2"),
    "wait": Mark("W", "#ffffff", "#c44601"),
    "collective": Mark("C", "#000000", "#cc79a7"),
    "optimizer": Mark("O", "#ffffff", "#00805f"),
    "other": Mark(".", "#ffffff", "#666666"),
    "evaluate": Mark("E", "#000000", "#f0e442"),
    "save": Mark("S", "#000000", "#dddddd"),
    "load": Mark("L", "#000000", "#b0a0e0"),
}
LEVELS: dict[Level, str] = {"": "", "dim": "dim", "good": "green", "warn": "yellow", "bad": "bold red"}
SPARKS = "▁▂▃▄▅▆▇█"


class Marks:
    """What a terminal can show: colours, no more than 16 of them (`few`), letters beyond ASCII."""

    def __init__(self, *, colours: bool = True, few: bool = False, ascii_only: bool = False) -> None:
        self.colours = colours
        self._lettered = few or not colours
        self.rule, self.chosen, self.more = ("-", ">", "~") if ascii_only else ("─", "▸", "…")
        self._sparks = "_.-=+*%#" if ascii_only else SPARKS
        self._styles = {name: Style.parse(f"{mark.ink} on {mark.ground}") for name, mark in PHASES.items()}
        self.ascii_only = ascii_only

    def bar(self, spent: Mapping[str, float], width: int) -> Text:
        text = Text(no_wrap=True)
        for name, count in largest_remainder(spent, width).items():
            symbol = PHASES[name].symbol
            filling = symbol.lower() if self._lettered else " "
            text.append(symbol + filling * (count - 1), self._styles[name] if self.colours else "")
        text.append(" " * (width - len(text)))
        return text

    def legend(self, present: Collection[str], width: int) -> Text:
        """Returns which letter is which phase: all of them, or, where there is no room, those that occur."""
        whole = self.named(list(PHASES))
        return whole if len(whole) <= width else self.named([name for name in PHASES if name in present])

    def named(self, names: Sequence[str]) -> Text:
        text = Text(" ", no_wrap=True)
        for name in names:
            text.append(PHASES[name].symbol, self._styles[name] if self.colours else "bold")
            text.append(f" {name}  ", "dim")
        return text

    def spark(self, values: Sequence[Any], width: int) -> str:
        """Returns numbers as a curve of at most `width` cells, each the mean of some; what is no number is a blank.

        >>> Marks().spark([0, 0, 1, 1, 2, float("nan"), 4, 4], 4), Marks(ascii_only=True).spark([1], 4)
        ('▁▃▅█', '=')
        """
        count = min(width, len(values))
        edges = [number * len(values) // count for number in range(count)] + [len(values)]
        values = [mean_of(values[begin:end]) for begin, end in pairwise(edges)]
        numbers = [value for value in values if is_finite(value)]
        low, high = min(numbers, default=0.0), max(numbers, default=0.0)
        top = len(self._sparks) - 1
        moves = high - low > 1e-9 * max(abs(high), abs(low))  # and not only in its last digit
        scale = top / (high - low) if moves and is_finite(high - low) else 0.0
        flat = 0 if scale else top // 2
        return "".join(
            self._sparks[flat + round((value - low) * scale)] if is_finite(value) else " " for value in values
        )

    def cut(self, text: str, width: int) -> str:
        """Returns a text in exactly `width` cells; where it is longer, its end is marked."""
        if cell_len(text) <= width:
            return set_cell_size(text, max(0, width))
        return set_cell_size(text, max(0, width - 1)) + self.more[: max(0, width)]


def mean_of(values: Sequence[Any]) -> float | None:
    """Returns the mean of what is a number; None where nothing is."""
    numbers = [float(value) for value in values if is_finite(value)]
    return sum(numbers) / len(numbers) if numbers else None


def is_finite(value: Any) -> bool:
    """Returns whether a value is a number that has a place on a scale."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


FEW_LINES = 30  # of a terminal that has no room for more than a few of each
TITLES = {"out": "standard output", "err": "standard error", "events": "standard output"}


@dataclass(frozen=True)
class Layout:
    """How many lines each part gets; 0 where there is no room for it."""

    ranks: int
    run_events: int
    panel: int
    legend: int = 1

    @classmethod
    def of(cls, free: int, ranks: int, run_events: int) -> Layout:
        """Divides what is left for numbers 4 to 7: ranks before the panel, the panel before the events.

        >>> Layout.of(20, ranks=8, run_events=9)
        Layout(ranks=8, run_events=3, panel=5, legend=1)
        """
        roomy = free > FEW_LINES
        run_events = min(run_events, 6 if roomy else 3)
        least = (10 if roomy else 5) + 2  # with head and legend
        shown = run_events + 1 if run_events and free >= 14 else 0
        rows = max(1, min(ranks, free - least - shown - 1))
        panel = free - 2 - rows - shown - 1
        if panel < 1:
            return cls(max(1, min(ranks, free - 1)), 0, 0, legend=int(free > 2))
        return cls(rows, max(0, shown - 1), panel)


class Renderer:
    """The lines of a model, `width` cells wide; without `is_live` no rank is marked as the chosen one."""

    def __init__(self, model: WatchModel, marks: Marks, width: int, *, is_live: bool = True) -> None:
        self.model, self.marks, self.width, self.is_live = model, marks, max(20, width), is_live
        self.at_width = min(44, max(16, self.width * 28 // 100))
        hosts = {log.host for log in model.logs.values()}
        self.host_width = min(20, max(map(len, hosts), default=0)) if len(hosts) > 1 and self.width >= 110 else 0

    def screen(self, output: Sequence[str], height: int) -> list[Text]:
        if self.model.choice.is_help:
            return self._fitted(list(self._keys()), height)
        top = list(self._top())
        events = self.model.panel == "events"
        shown = 0 if events else len(self.model.run_events)
        layout = Layout.of(height - len(top) - 1, len(self.model.ranks), shown)
        lines = [*top, *self._ranks(layout)]
        if layout.run_events:
            lines += self._run_events(layout.run_events)
        if layout.panel:
            lines += self._events(layout.panel) if events else self._output(output, layout.panel)
        return self._fitted(lines, height)

    def whole(self, output: Sequence[str]) -> list[Text]:
        """Returns all that there is, in as many lines as it takes; of the output the last ten lines."""
        ranks, output = len(self.model.ranks), output[-10:]
        lines = [*self._top(), *self._ranks(Layout(max(1, ranks), 0, 0))]
        if self.model.run_events:
            lines += self._events(len(self.model.run_events) * 20)
        return self._cut(lines + (self._output(output, len(output)) if output else []))

    def _fitted(self, lines: list[Text], height: int) -> list[Text]:
        blank = [Text("")] * max(0, height - 1 - len(lines))
        return self._cut([*lines[: height - 1], *blank, self._footer()][:height])

    def _cut(self, lines: list[Text]) -> list[Text]:
        for line in lines:
            line.truncate(self.width)
        return lines

    def _line(self, text: str, style: str = "") -> Text:
        return Text(self.marks.cut(text, self.width).rstrip(), style, no_wrap=True)

    # --- 1, 2, 3 --------------------------------------------------------------------------------

    def _top(self) -> Iterator[Text]:
        yield self._title()
        yield self._line(f" {'   '.join(self.model.figures)}", "bold")
        if self.model.values:
            yield self._values()
        if self.model.failure:
            for text in wrap(self.model.failure, self.width - 2)[:3]:
                yield self._line(f" {text}", LEVELS["bad"])

    def _title(self) -> Text:
        model = self.model
        state = run_status(model.run, model.launcher_state, model.now)
        took_text = format_elapsed(took(model.run, model.now))
        left = self.width - len(state.text) - len(took_text) - 4
        text = Text(f" {self.marks.cut(model.name(left), left)} ", no_wrap=True)
        text.append(state.text, f"bold {LEVELS[state.level]}")
        return text.append(f"  {took_text}")

    def _values(self) -> Text:
        text = Text(no_wrap=True)
        for value in self.model.values:
            shown = self._value(value)
            if len(text) and text.cell_len + shown.cell_len > self.width:
                text.append(f" {self.marks.more}", "dim")
                break
            text.append_text(shown)
        return text

    def _value(self, value: Value) -> Text:
        text = Text(f" {self.marks.cut(value.name, min(cell_len(value.name), 24))} ", "dim")
        text.append(value.last, "bold not dim")
        return text.append(f" {self.marks.spark(value.before, 8 if self.width < 100 else 16)} ", "cyan not dim")

    # --- 4, 5 -----------------------------------------------------------------------------------

    def _ranks(self, layout: Layout) -> Iterator[Text]:
        first = self._first_row(layout.ranks)
        rows = [self.model.row(rank) for rank in self.model.ranks[first : first + layout.ranks]]
        yield self._head(first, len(rows))
        yield from map(self._row, rows)
        if layout.legend:
            yield self.marks.legend({name for row in rows for name in row.pace.spent}, self.width)

    def _first_row(self, count: int) -> int:
        """The chosen rank stands in the middle, as far as there are ranks on both sides."""
        ranks = self.model.ranks
        at = next((row for row, rank in enumerate(ranks) if rank >= self.model.rank), 0)
        return max(0, min(at - count // 2, len(ranks) - count))

    @property
    def _bar_width(self) -> int:
        return max(0, self.width - 29 - self.at_width - (self.host_width and self.host_width + 1))

    def _head(self, first: int, count: int) -> Text:
        all_ = len(self.model.ranks)
        part = "" if count >= all_ else f"{first + 1}-{first + count} of {all_:,}"
        host = f"{'host':<{self.host_width}} " if self.host_width else ""
        bar = self.marks.cut("where the last steps went", self._bar_width)
        at = self.marks.cut("at", max(0, self.at_width - len(part))) + part
        return self._line(f"   rank {host}{'step':>9}{'a step':>10} {bar} {at}", "dim")

    def _row(self, row: Row) -> Text:
        is_chosen = self.is_live and row.rank == self.model.rank
        text = Text(f" {self.marks.chosen if is_chosen else ' '}", "bold" if is_chosen else "", no_wrap=True)
        text.append(f"{row.rank:>5}", "reverse" if is_chosen else "")
        if self.host_width:
            text.append(f" {self.marks.cut(row.host, self.host_width)}")
        step = self.marks.cut(f"{row.step:>9,}", 9) if row.step < 10**12 else f"{'?':>9}"
        took = format_duration(row.pace.seconds) if row.pace.seconds else ""
        text.append(f" {step}{took:>10.10}")
        text.append(" ").append_text(self.marks.bar(row.pace.spent, self._bar_width))
        text.append(f" {self.marks.cut(row.at.text, self.at_width).rstrip()}", LEVELS[row.at.level])
        return text

    # --- 6, 7 -----------------------------------------------------------------------------------

    def _rule(self, *titles: str) -> Text:
        rule = self.marks.rule * 2
        text = " ".join(f"{rule} {title}" for title in titles) + " "
        return Text(self.marks.cut(text + self.marks.rule * max(0, self.width - cell_len(text)), self.width), "dim")

    def _run_events(self, count: int) -> Iterator[Text]:
        all_ = self.model.run_events
        more = f" (the last {count} of {len(all_)}: f shows all)" if len(all_) > count else ""
        yield self._rule(f"events{more}")
        for each in all_[-count:]:
            yield self._event_line(each, self.marks.cut(each.text.split("\n")[0], self.width - 22).rstrip())

    def _events(self, count: int) -> list[Text]:
        lines = [line for each in self.model.run_events for line in self._event_lines(each)]
        return [self._rule("events"), *(lines[-count:] or [self._line(" nothing so far", "dim")])]

    def _event_lines(self, each: RunEvent) -> Iterator[Text]:
        """All that there is to say of it, in as many lines as that takes."""
        texts = [line for text in each.text.split("\n") for line in wrap(text, max(20, self.width - 22)) or [""]]
        for number, text in enumerate(texts):
            yield Text(" " * 22, no_wrap=True).append(text) if number else self._event_line(each, text)

    def _event_line(self, each: RunEvent, text: str) -> Text:
        line = Text(f" {each.clock}  ", "dim", no_wrap=True)
        line.append(f"{each.kind:<9}  ", f"not dim {LEVELS[each.level]}")
        return line.append(text, "not dim")

    def _output(self, output: Sequence[str], count: int) -> list[Text]:
        rank, stream = self.model.rank, TITLES[self.model.panel]
        file = escape_control(path_as_said(self.model.output()))
        lines = [self._line(f" {line}") for line in output[-count:]] if count else []
        return [self._rule(f"rank {rank}, {stream}", file), *(lines or [self._line(" nothing so far", "dim")])]

    # --- 8 ----------------------------------------------------------------------------------------

    def _footer(self) -> Text:
        arrows = "j k" if self.marks.ascii_only else "↑ ↓"
        choice = self.model.choice
        other = "stdout" if self.model.panel == "err" else "stderr"
        events = "output" if self.model.panel == "events" else "events"
        keys = [("q", "quit"), (arrows, "rank"), ("Tab", other), ("f", events), ("n", "trouble")]
        keys += [("a", "attempt")] if self.model.attempts[1:] else []
        text = Text(" PAUSED " if choice.is_paused else "", "bold reverse", no_wrap=True)
        for key, what in [*keys, ("Space", "go on" if choice.is_paused else "pause"), ("?", "keys")]:
            text.append(f" {key}", "bold not reverse").append(f" {what} ", "dim not bold not reverse")
        return text

    def _keys(self) -> Iterator[Text]:
        yield self._line(" samestep watch: keys", "bold")
        for key, what in KEYS:
            yield Text(f"   {key:<16}", "bold", no_wrap=True).append(what, "not bold")
        yield Text("")
        phases = list(PHASES)
        for names in (phases[:7], phases[7:]):
            yield Text("  ").append_text(self.marks.named(names))
        yield self._line("   these have a share of a bar only where the rank has just been in one", "dim")
