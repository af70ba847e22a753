"""Reads events into less than half of the memory: a run of 64 ranks and 10,000 steps has 640,000 lines.

As json gives it, a line of 600 bytes takes 5.3 kB: lists of lists, and a new "forward" for each line that says so.
Packed it takes 2.2: pieces and buckets are bytes until somebody wants them, and a name is one object for all lines.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Sequence
from sys import intern
from typing import Any, overload

from samestep.events import Reader

_LAST = 1e11  # seconds since 1970; later is no time


class Packed(Sequence[Any]):
    """A list that is kept as bytes; only this process makes and reads them.

    Example:
        >>> list(Packed([["forward", 0, 12]]))
        [['forward', 0, 12]]
    """

    __slots__ = ("_bytes", "_length")

    def __init__(self, values: list[Any]) -> None:
        self._bytes, self._length = marshal.dumps(values), len(values)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(marshal.loads(self._bytes))  # noqa: S302

    @overload
    def __getitem__(self, place: int) -> Any: ...

    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...

    def __getitem__(self, place: int | slice) -> Any:
        return list(self)[place]


class PackingReader(Reader):
    """Reads events, and packs what is large in them."""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields what has been written since the last call."""
        for event in super().events():
            event["t"] = instant(event["t"])
            yield _packed(event) if event["kind"] == "step" else event


def instant(moment: float) -> float:
    """Returns a time since 1970 as one can count with.

    >>> instant(1.5), instant(float("nan")), instant(10**400)
    (1.5, 0.0, 100000000000.0)
    """
    return float(min(moment, _LAST)) if moment > 0 else 0.0


def _packed(line: dict[str, Any]) -> dict[str, Any]:
    packed = {intern(name): value for name, value in line.items()}
    packed["spent"] = {intern(name): value for name, value in line["spent"].items()}
    packed["work"] = {intern(name): value for name, value in line["work"].items()}
    packed["spans"], packed["buckets"] = Packed(line["spans"]), Packed(line["buckets"])
    return packed
