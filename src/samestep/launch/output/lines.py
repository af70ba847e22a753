"""Lines of output: assembled from bytes, merged where several ranks print the same, freed of escape sequences.

rank 0   a  b  c                 [ranks 0-2] a
rank 1   a     c        ->       [rank 0] b
rank 2   a     c  d              [3 ranks] c, [rank 2] d
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from samestep.text import spans

MERGE_WINDOW_S = 0.15  # what a person does not notice, and ranks in step are apart
MOST_HELD = 4096  # lines
CHUNK = 1 << 16  # bytes; a line longer than this is shown in pieces
RESET = b"\x1b[0m"
_COLOUR = re.compile(rb"\x1b\[[\d;:]*m")
_CONTROL = re.compile(
    rb"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)"  # strings, such as titles, up to their end (ECMA-48)
    rb"|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?"  # sequences and other escapes
    rb"|[\0-\x08\x0a-\x1f\x7f]|\xc2[\x80-\x9f]"  # single characters, those of C1 in UTF-8; the tabulator stays
)


class LineAssembler:
    """Makes whole lines of what a stream holds; what a carriage return has overwritten is left out."""

    def __init__(self) -> None:
        self.held = b""  # the unfinished line

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that are whole now; all that is left where there is no more data."""
        *lines, rest = (self.held + data).split(b"\n") if data else (self.held,)
        self.held = _without_overwritten(rest)
        if len(self.held) >= CHUNK or (self.held and not data):
            lines.append(self.held)
            self.held = b""
        return [last_drawn(line) for line in lines]


def _without_overwritten(rest: bytes) -> bytes:
    r"""Returns an unfinished line without what has been drawn over; a bar may go on for days.

    >>> _without_overwritten(b"10 %\r20 %\r30 %"), _without_overwritten(b"10 %\r20 %\r"), _without_overwritten(b"loss")
    (b'\r30 %', b'\r20 %\r', b'loss')
    """
    drawn = rest.rstrip(b"\r")
    _, back, last = drawn.rpartition(b"\r")
    return back + last + rest[len(drawn) :]


def last_drawn(line: bytes) -> bytes:
    r"""Returns a line as it is shown: what a carriage return has overwritten is left out.

    >>> last_drawn(b"50 %\r100 %")
    b'100 %'
    """
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def strip_control(line: bytes) -> bytes:
    r"""Returns a line without what would move a terminal's cursor, clear it, or rename it; colours stay, and end.

    >>> strip_control(b"\x1b]0;title\x07\x1b[2J\x1b[31mred")
    b'\x1b[31mred\x1b[0m'
    """
    kept = _CONTROL.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else b"", line)
    coloured = kept.rfind(b"\x1b[")
    return kept + RESET if coloured >= 0 and not kept[coloured:].startswith((RESET, b"\x1b[m")) else kept


@dataclass
class _Entry:
    number: int
    text: bytes
    since: float
    ranks: set[int] = field(default_factory=set)


class LineMerger:
    """Merges the lines of one stream; a line waits `window` seconds for other ranks, and 0 merges nothing.

    A line joins the first equal one that waits, if what its rank has printed before is in front of that. So every
    rank's lines stay in order, none is lost, and what a rank prints twice is shown twice.

    Example:
        >>> merger = LineMerger(2)
        >>> merger.feed(0, b"hello", now=0.0)
        >>> merger.feed(1, b"hello", now=0.1)
        >>> merger.take(now=0.1)
        [b'[2 ranks] hello']
    """

    def __init__(self, size: int, window: float = MERGE_WINDOW_S) -> None:
        self._size = size
        self._window = window
        self._waiting: deque[_Entry] = deque()
        self._same: defaultdict[bytes, list[_Entry]] = defaultdict(list)
        self._last: dict[int, int] = {}  # the number of the line that each rank has printed last
        self._numbers = 0
        self._plain: list[bytes] = []  # lines that are shown at once

    def feed(self, rank: int, text: bytes, now: float) -> None:
        if not self._window:
            self._plain.append(b"[rank %d] %b" % (rank, text))
            return
        same, last = self._same[text], self._last.get(rank, 0)
        if same and same[-1].number > last:
            entry = same[bisect_right(same, last, key=lambda entry: entry.number)]
        else:
            self._numbers += 1
            entry = _Entry(self._numbers, text, now)
            self._waiting.append(entry)
            same.append(entry)
        entry.ranks.add(rank)
        self._last[rank] = entry.number

    def take(self, now: float, *, everything: bool = False) -> list[bytes]:
        shown, self._plain = self._plain, []
        while self._waiting and (everything or self._is_due(self._waiting[0], now)):
            entry = self._waiting.popleft()
            same = self._same[entry.text]
            del same[0]  # in the order of their numbers, as they wait
            if not same:
                del self._same[entry.text]
            shown.append(label(entry.ranks, self._size) + b" " + entry.text)
        return shown

    def _is_due(self, entry: _Entry, now: float) -> bool:
        return now - entry.since >= self._window or len(entry.ranks) == self._size or len(self._waiting) > MOST_HELD

    def due(self) -> float | None:
        """Returns when the first line that waits need wait no longer; None where none waits for others."""
        return self._waiting[0].since + self._window if self._waiting else None


def label(ranks: Collection[int], size: int) -> bytes:
    """Returns what precedes a line.

    >>> label({1}, 4), label({0, 1, 3}, 4), label({0, 1, 2, 3}, 4)
    (b'[rank 1]', b'[ranks 0-1, 3]', b'[4 ranks]')
    """
    if len(ranks) == 1:
        return b"[rank %d]" % next(iter(ranks))
    return f"[{size} ranks]".encode() if len(ranks) == size else f"[ranks {spans(sorted(ranks))}]".encode()
