"""Steps of a pipeline as pictures: which rank computes what when, and where the time went.

A page (.html, with plotly) or an image (.png, with Pillow), for where no page can be opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import UsageError
from samestep.schedule.simulate import Span, Timeline

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

NEEDS = {".html": ("plotly", "plotly"), ".png": ("Pillow", "PIL")}  # by the kind of file: package and module
COLOURS = {  # that the colour-blind can tell apart: Okabe and Ito
    "F": ("forward", "#56B4E9"),
    "B": ("backward", "#E69F00"),
    "I": ("backward, inputs", "#E69F00"),
    "W": ("backward, weights", "#009E73"),
    "message": ("message", "#999999"),
}
PART_COLOURS = ("#0072B2", "#F0E442", "#CC79A7", "#999999", "#D55E00")
PARTS_TITLE = "where a step's time goes"
AXIS_TITLE = "ms from the step's begin"
ROW = 46  # pixels of a rank
WIDTH, MAX_WIDTH = 1400, 8000  # pixels of an image; wider where boxes would be too narrow for their numbers
_BOX = 34  # pixels that an action has at least, in the mean
_LEFT, _RIGHT, _TOP, _TITLE, _AXIS, _LEGEND = 86, 24, 10, 34, 56, 40
_MESSAGE = 9  # pixels of a message, above its sender's row
_INK, _PALE = "#222222", "#dddddd"


def draw(timelines: Mapping[str, Timeline], parts: Mapping[str, float], file: Path) -> None:
    """Writes a page (.html) or an image (.png) of steps, on one scale, and below them of what seconds went to."""
    if file.suffix.lower() not in NEEDS:
        raise UsageError(f"a picture is a page or an image: {file.name} must end in .html or .png")
    package, module = NEEDS[file.suffix.lower()]
    if find_spec(module) is None:
        raise UsageError(f"a picture needs {package}: pip install 'samestep[report]'")
    titled = {
        f"{name}: {1e3 * each.seconds:.2f} ms, {100 * each.idle:.0f} % idle": each for name, each in timelines.items()
    }
    (_draw_image if package == "Pillow" else _draw_page)(titled, parts, file)


def _boxes(timeline: Timeline, kind: str) -> list[Span]:
    """Returns what is drawn in the colour of a kind of action, or of messages; nothing that takes no time."""
    return [
        span
        for span in timeline.spans
        if kind == ("message" if span.target is not None else span.action.kind) and span.end > span.begin
    ]


def _draw_page(timelines: Mapping[str, Timeline], parts: Mapping[str, float], file: Path) -> None:
    from plotly.subplots import make_subplots

    heights = [ROW * each.schedule.ranks for each in timelines.values()] + ([ROW] if parts else [])
    figure: Any = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        subplot_titles=[*timelines] + ([PARTS_TITLE] if parts else []),
        row_heights=heights,
        vertical_spacing=min(0.2, 60 / sum(heights)),
    )
    bar = {"orientation": "h", "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "col": 1}
    shown: set[str] = set()
    for row, timeline in enumerate(timelines.values(), 1):
        for kind, (name, colour) in COLOURS.items():
            if spans := _boxes(timeline, kind):
                figure.add_bar(
                    name=name,
                    legendgroup=name,
                    showlegend=name not in shown,
                    base=[1e3 * span.begin for span in spans],
                    x=[1e3 * (span.end - span.begin) for span in spans],
                    y=[f"rank {span.rank}" for span in spans],
                    text=[str(span.action.micro_batch) for span in spans],
                    constraintext="none",
                    customdata=[[str(span.action), 1e3 * (span.end - span.begin)] for span in spans],
                    hovertemplate="%{customdata[0]}: %{customdata[1]:.3f} ms from %{base:.3f} ms<extra></extra>",
                    marker={"color": colour, "line": {"color": "white", "width": 1}},
                    width=0.18 if kind == "message" else 0.7,
                    offset=-0.5 if kind == "message" else -0.35,
                    row=row,
                    **bar,
                )
                shown.add(name)
        figure.update_yaxes(autorange="reversed", row=row, col=1)
    for place, (name, seconds) in enumerate(parts.items()):
        figure.add_bar(
            name=name,
            showlegend=False,
            base=[1e3 * sum(list(parts.values())[:place])],
            x=[1e3 * seconds],
            y=["a step"],
            text=[name],
            hovertemplate=f"{name}: {1e3 * seconds:.3f} ms<extra></extra>",
            marker={"color": PART_COLOURS[place % len(PART_COLOURS)]},
            row=len(heights),
            **bar,
        )
    figure.update_layout(
        barmode="overlay",
        template="plotly_white",
        height=sum(heights) + 80 * len(heights) + 60,
        legend={"orientation": "h", "y": -0.12},
    )
    figure.update_xaxes(title=AXIS_TITLE, row=len(heights), col=1)
    figure.write_html(file, include_plotlyjs=True)


def _draw_image(timelines: Mapping[str, Timeline], parts: Mapping[str, float], file: Path) -> None:
    from PIL import Image, ImageDraw, ImageFont

    busiest = max(max(map(len, each.schedule.rank_actions)) for each in timelines.values())
    width = min(MAX_WIDTH, max(WIDTH, _LEFT + _RIGHT + _BOX * busiest))
    rows = [ROW * each.schedule.ranks for each in timelines.values()] + ([ROW] if parts else [])
    image = Image.new("RGB", (width, _TOP + sum(rows) + _TITLE * len(rows) + _AXIS + _LEGEND), "white")
    longest = max([sum(parts.values()), *(span.end for each in timelines.values() for span in each.spans)])
    font = ImageFont.load_default(15)
    assert isinstance(font, ImageFont.FreeTypeFont)
    sheet = _Sheet(ImageDraw.Draw(image), font, width, longest)
    for title, timeline in timelines.items():
        sheet.step(title, timeline)
    if parts:
        sheet.parts(parts)
    sheet.axis()
    sheet.legend(timelines)
    image.save(file)


@dataclass
class _Sheet:
    """An image that is drawn from the top to the bottom; `longest` seconds fill its width, `top` is what comes next."""

    canvas: ImageDraw
    font: FreeTypeFont
    width: int
    longest: float
    top: int = _TOP

    def _x(self, seconds: float) -> float:
        return _LEFT + (self.width - _LEFT - _RIGHT) * seconds / self.longest

    def step(self, title: str, timeline: Timeline) -> None:
        ranks = timeline.schedule.ranks
        self._section(title, ROW * ranks)
        for rank in range(ranks):
            self._text(_LEFT - 10, self.top + ROW * (rank + 0.5), f"rank {rank}", "rm")
        for kind, (_, colour) in COLOURS.items():
            for span in _boxes(timeline, kind):
                row = self.top + ROW * span.rank
                if kind == "message":
                    self._box(span.begin, span.end, row, row + _MESSAGE, colour, "")
                else:
                    text = str(span.action.micro_batch)
                    self._box(span.begin, span.end, row + _MESSAGE + 2, row + ROW - 4, colour, text)
        self.top += ROW * ranks

    def parts(self, parts: Mapping[str, float]) -> None:
        values = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items())
        self._section(f"{PARTS_TITLE}: {values} ms", ROW)
        begin = 0.0
        for place, (name, seconds) in enumerate(parts.items()):
            low, high = sorted((begin, begin + seconds))
            self._box(low, high, self.top + 4, self.top + ROW - 4, PART_COLOURS[place % len(PART_COLOURS)], name)
            begin += seconds
        self.top += ROW

    def axis(self) -> None:
        self.canvas.line((_LEFT, self.top + 4, self.width - _RIGHT, self.top + 4), fill=_INK)
        for tick in _ticks(1e3 * self.longest):
            x = self._x(tick / 1e3)
            self.canvas.line((x, self.top + 4, x, self.top + 9), fill=_INK)
            self._text(x, self.top + 12, f"{tick:g}", "ma")
        self._text((_LEFT + self.width - _RIGHT) / 2, self.top + 32, AXIS_TITLE, "ma")
        self.top += _AXIS

    def legend(self, timelines: Mapping[str, Timeline]) -> None:
        left = float(_LEFT)
        for kind, (name, colour) in COLOURS.items():
            if any(_boxes(timeline, kind) for timeline in timelines.values()):
                self.canvas.rectangle((left, self.top + 10, left + 18, self.top + 24), fill=colour)
                self._text(left + 26, self.top + 17, name, "lm")
                left += 26 + self.font.getlength(name) + 28
        self.top += _LEGEND

    def _section(self, title: str, height: int) -> None:
        """Writes a title, and lines for the moments below it."""
        self._text(_LEFT, self.top + _TITLE / 2, title, "lm")
        self.top += _TITLE
        for tick in _ticks(1e3 * self.longest):
            x = self._x(tick / 1e3)
            self.canvas.line((x, self.top, x, self.top + height), fill=_PALE)

    def _box(self, begin: float, end: float, top: float, bottom: float, colour: str, text: str) -> None:
        left, right = self._x(begin), self._x(end)
        self.canvas.rectangle((left, top, max(left, right - 2), bottom), fill=colour)
        if self.font.getlength(text) < right - left - 1:
            self._text((left + right) / 2, (top + bottom) / 2, text, "mm", "white" if colour == "#0072B2" else _INK)

    def _text(self, left: float, top: float, text: str, anchor: str, colour: str = _INK) -> None:
        self.canvas.text((left, top), text, fill=colour, font=self.font, anchor=anchor)


def _ticks(longest: float) -> Iterator[float]:
    """Yields some ten round numbers from 0 on.

    >>> list(_ticks(43))
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]
    """
    power = 10.0 ** math.floor(math.log10(longest / 10)) if longest > 0 else 1.0
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= longest / 10)
    for number in range(int(longest / step) + 1):
        yield round(number * step, 12)
