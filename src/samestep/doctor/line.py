"""One line of the doctor's: fine, or what is wrong, what that will cause, and the command that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__: list[str] = []

Level = Literal["fine", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("fine", "note", "warning", "error")


@dataclass(frozen=True)
class Line:
    """What was found of one thing.

    Attributes:
        about: the thing.
        level: "error" where training would fail, "warning" where it would be slow or would fail sometimes, "note" where
            something may surprise.
        text: what is so.
        effect: what it will cause; "" where it is fine.
        mend: a command, or what to do.
        host: where; "" for all.
    """

    about: str
    level: Level
    text: str
    effect: str = ""
    mend: str = ""
    host: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def fine(about: str, text: str) -> Line:
    """A line that needs nothing to be done."""
    return Line(about, "fine", text)


def worst(lines: Iterable[Line]) -> Level:
    """Returns the level of the worst line."""
    return max((line.level for line in lines), key=LEVELS.index, default="fine")


def kept(about: str, look: Callable[[], Iterable[Line]]) -> Iterator[Line]:
    """Yields what is seen; a look that fails itself is a line too, so that the others are still shown.

    >>> [line.text for line in kept("disk", lambda: [fine("disk", "300 MB/s")])]
    ['300 MB/s']
    """
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001  (a machine has more ways to be odd than are known here)
        text = f"cannot be looked at: {type(error).__name__}: {error}"
        yield Line(about, "note", text, "unknown")
