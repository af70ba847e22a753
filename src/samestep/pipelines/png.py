"""Steps of a pipeline as one image, for where no page can be opened: an issue, a slide, a paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.pipelines.lanes import AXIS_TITLE, COLOURS, PART_COLOURS, PARTS_TITLE, ROW, boxes, title
from samestep.schedule.simulate import Span, Timeline

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

__all__: list[str] = []

WIDTH, WIDEST = 1400, 8000  # pixels; wider where boxes would be too narrow for their numbers
_BOX = 34  # pixels that an action has at least, in the mean
_LEFT, _RIGHT, _TOP, _TITLE, _AXIS, _LEGEND = 86, 24, 10, 34, 56, 40
_THIN = 9  # pixels of a message, above its sender's lane
_INK, _PALE = "#222222", "#dddddd"


def draw_png(timelines: Mapping[str, Timeline], parts: Mapping[str, float], file: Path) -> None:
    """Writes the image.

    Args:
        timelines: title -> a step; drawn one below the other, on one scale.
        parts: seconds of a step by what they went to; drawn at the foot, if there are any.
        file: where.
    """
    from PIL import Image, ImageDraw, ImageFont

    busiest = max(max(map(len, each.plan.orders)) for each in timelines.values())
    width = min(WIDEST, max(WIDTH, _LEFT + _RIGHT + _BOX * busiest))
    rows = [ROW * each.plan.ranks for each in timelines.values()] + ([ROW] if parts else [])
    image = Image.new("RGB", (width, _TOP + sum(rows) + _TITLE * len(rows) + _AXIS + _LEGEND), "white")
    longest = max([sum(parts.values()), *(span.end for each in timelines.values() for span in each.spans)])
    font = ImageFont.load_default(15)
    assert isinstance(font, ImageFont.FreeTypeFont)
    sheet = _Sheet(ImageDraw.Draw(image), font, width, longest)
    for name, timeline in timelines.items():
        sheet.step(title(name, timeline), timeline)
    if parts:
        sheet.parts(parts)
    sheet.axis()
    sheet.legend(timelines)
    image.save(file)


@dataclass
class _Sheet:
    """An image that is drawn from its top to its foot.

    Attributes:
        brush: that draws.
        font: of all text.
        width: in pixels.
        longest: seconds that fill the width.
        top: where the next thing begins.
    """

    brush: ImageDraw
    font: FreeTypeFont
    width: int
    longest: float
    top: int = _TOP

    def at(self, seconds: float) -> float:
        """Returns where a moment is."""
        return _LEFT + (self.width - _LEFT - _RIGHT) * seconds / self.longest

    def step(self, above: str, timeline: Timeline) -> None:
        """Draws a step, lane by lane."""
        self._ruled(above, ROW * timeline.plan.ranks)
        for rank in range(timeline.plan.ranks):
            self._text(_LEFT - 10, self.top + ROW * (rank + 0.5), f"rank {rank}", "rm")
        for kind, (_, colour) in COLOURS.items():
            for span in boxes(timeline, kind):
                self._span(span, colour)
        self.top += ROW * timeline.plan.ranks

    def _span(self, span: Span, colour: str) -> None:
        lane, thin = self.top + ROW * span.rank, span.target is not None
        top, bottom = (lane, lane + _THIN) if thin else (lane + _THIN + 2, lane + ROW - 4)
        self._box(span.begin, span.end, top, bottom, colour, "" if thin else str(span.action.micro_batch))

    def parts(self, parts: Mapping[str, float]) -> None:
        """Draws one bar of all parts."""
        told = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items())
        self._ruled(f"{PARTS_TITLE}: {told} ms", ROW)
        begin = 0.0
        for place, (name, seconds) in enumerate(parts.items()):
            low, high = sorted((begin, begin + seconds))
            self._box(low, high, self.top + 4, self.top + ROW - 4, PART_COLOURS[place % len(PART_COLOURS)], name)
            begin += seconds
        self.top += ROW

    def axis(self) -> None:
        """Draws the milliseconds."""
        self.brush.line((_LEFT, self.top + 4, self.width - _RIGHT, self.top + 4), fill=_INK)
        for tick in _ticks(1e3 * self.longest):
            place = self.at(tick / 1e3)
            self.brush.line((place, self.top + 4, place, self.top + 9), fill=_INK)
            self._text(place, self.top + 12, f"{tick:g}", "ma")
        self._text((_LEFT + self.width - _RIGHT) / 2, self.top + 32, AXIS_TITLE, "ma")
        self.top += _AXIS

    def legend(self, timelines: Mapping[str, Timeline]) -> None:
        """Names the colours that are there."""
        left = float(_LEFT)
        for kind, (name, colour) in COLOURS.items():
            if any(boxes(timeline, kind) for timeline in timelines.values()):
                self.brush.rectangle((left, self.top + 10, left + 18, self.top + 24), fill=colour)
                self._text(left + 26, self.top + 17, name, "lm")
                left += 26 + self.font.getlength(name) + 28
        self.top += _LEGEND

    def _ruled(self, above: str, height: int) -> None:
        """Writes what stands above, and lines for the moments below it."""
        self._text(_LEFT, self.top + _TITLE / 2, above, "lm")
        self.top += _TITLE
        for tick in _ticks(1e3 * self.longest):
            self.brush.line((self.at(tick / 1e3), self.top, self.at(tick / 1e3), self.top + height), fill=_PALE)

    def _box(self, begin: float, end: float, top: float, bottom: float, colour: str, text: str) -> None:
        left, right = self.at(begin), self.at(end)
        self.brush.rectangle((left, top, max(left, right - 2), bottom), fill=colour)
        if self.font.getlength(text) < right - left - 1:
            self._text((left + right) / 2, (top + bottom) / 2, text, "mm", "white" if colour == "#0072B2" else _INK)

    def _text(self, left: float, top: float, text: str, anchor: str, colour: str = _INK) -> None:
        self.brush.text((left, top), text, fill=colour, font=self.font, anchor=anchor)


def _ticks(longest: float) -> Iterator[float]:
    """Yields some ten round numbers from 0 on.

    >>> list(_ticks(43))
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]
    """
    power = 10.0 ** math.floor(math.log10(longest / 10)) if longest > 0 else 1.0
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= longest / 10)
    for number in range(int(longest / step) + 1):
        yield round(number * step, 12)
