"""One finding of doctor: ok, or what is wrong, what that will cause, and the command that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from samestep.text import escape_control

__all__: list[str] = []

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
FIELDS = ("check", "level", "text", "effect", "fix")  # of a line, in its order


@dataclass(frozen=True)
class Finding:
    check: str
    # "error" where training would fail, "warning" where it would be slow or would fail sometimes, "note" where
    # something may surprise
    level: Level
    text: str
    effect: str = ""  # what it will cause; "" where it is ok
    fix: str = ""  # a command that works when pasted; behind `#` stands a remark
    host: str = ""  # where; "" for all

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(check: str, text: str) -> Finding:
    """A line that needs nothing to be done."""
    return Finding(check, "ok", text)


def worst_level(lines: Iterable[Finding]) -> Level:
    return max((line.level for line in lines), key=LEVELS.index, default="ok")


def from_remote(host: str, found: dict[str, Any]) -> Iterator[Finding]:
    """Yields the lines that another host's doctor has told; what is in no form that is known here is passed over."""
    lines = found.get("lines")
    for line in lines if isinstance(lines, list) else ():
        if isinstance(line, dict) and line.get("level") in LEVELS:
            words = {name: escape_control(line.get(name, "")) for name in FIELDS if name != "level"}
            yield Finding(level=line["level"], host=host, **words)


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yields what is seen; a look that fails itself is a line too, so that the others are still shown.

    >>> [line.text for line in guarded("disk", lambda: [ok("disk", "300 MB/s")])]
    ['300 MB/s']
    """
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001  (a machine has more ways to be odd than are known here)
        text = f"cannot be looked at: {type(error).__name__}: {error}"
        yield Finding(check, "note", text, "unknown")
