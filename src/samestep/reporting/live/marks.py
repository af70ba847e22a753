"""Phases, values and levels as cells of a terminal: by colour, and by letter for those who see none.

    in colour     D▒ F▒▒▒▒ B▒▒▒▒▒▒▒ W▒▒▒ O▒▒         each phase on a ground of its own, with its letter at its head
    without       DdFffffBbbbbbbbWwwwOoo             each phase in its own letter, with a capital at its head
    16 colours    both: some grounds become the same

The grounds are Okabe and Ito's, which the colour-blind tell apart (https://jfly.uni-koeln.de/color, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from samestep.reporting.live.pace import apportioned
from samestep.reporting.live.standing import Level

__all__: list[str] = []


class Mark(NamedTuple):
    """How a phase is shown."""

    letter: str
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
    """What a terminal can show.

    Args:
        colours: it has some.
        few: no more than 16.
        ascii_only: it has no letters but those.
    """

    def __init__(self, *, colours: bool = True, few: bool = False, ascii_only: bool = False) -> None:
        self.colours = colours
        self._lettered = few or not colours
        self.rule, self.chosen, self.more = ("-", ">", "~") if ascii_only else ("─", "▸", "…")
        self._sparks = "_.-=+*%#" if ascii_only else SPARKS
        self._styles = {name: Style.parse(f"{mark.ink} on {mark.ground}") for name, mark in PHASES.items()}
        self.ascii_only = ascii_only

    def bar(self, spent: Mapping[str, float], width: int) -> Text:
        """Returns the share of each phase in `width` cells."""
        text = Text(no_wrap=True)
        for name, count in apportioned(spent, width).items():
            letter = PHASES[name].letter
            filling = letter.lower() if self._lettered else " "
            text.append(letter + filling * (count - 1), self._styles[name] if self.colours else "")
        text.append(" " * (width - len(text)))
        return text

    def legend(self, present: Collection[str], width: int) -> Text:
        """Returns which letter is which phase: all of them, or, where there is no room, those that occur."""
        whole = self.named(list(PHASES))
        return whole if len(whole) <= width else self.named([name for name in PHASES if name in present])

    def named(self, names: Sequence[str]) -> Text:
        """Returns the letters of phases with their names."""
        text = Text(" ", no_wrap=True)
        for name in names:
            text.append(PHASES[name].letter, self._styles[name] if self.colours else "bold")
            text.append(f" {name}  ", "dim")
        return text

    def spark(self, values: Sequence[Any], width: int) -> str:
        """Returns numbers as a curve of at most `width` cells, each the mean of some; what is no number is a blank.

        >>> Marks().spark([0, 0, 1, 1, 2, float("nan"), 4, 4], 4), Marks(ascii_only=True).spark([1], 4)
        ('▁▃▅█', '=')
        """
        values = [mean_of(part) for part in _parts(values, width)]
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


def _parts(values: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    """Divides a sequence into `count` parts, or fewer, that differ by one in length at most."""
    count = min(count, len(values))
    for number in range(count):
        yield values[number * len(values) // count : (number + 1) * len(values) // count]


def mean_of(values: Sequence[Any]) -> float | None:
    """Returns the mean of what is a number; None where nothing is."""
    numbers = [float(value) for value in values if is_finite(value)]
    return sum(numbers) / len(numbers) if numbers else None


def is_finite(value: Any) -> bool:
    """Returns whether a value is a number that has a place on a scale."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)
