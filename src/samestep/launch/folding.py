"""Lines that several ranks have in common are shown once, with the ranks that said them.

    rank 0   a  b  c                 [ranks 0-2] a
    rank 1   a     c        ->       [rank 0] b
    rank 2   a     c  d              [3 ranks] c … shown as soon as the last rank has said it
                                     [rank 2] d

A line waits a moment for the same line of other ranks. It joins the first of those that wait, if what its rank has
said before stands in front of it; so every rank's lines stay in its own order, none is lost, and what a rank says
twice is shown twice. Tracebacks fold line by line. torchrun shows a warning of 64 ranks 64 times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from samestep.text import spans

__all__: list[str] = []

HOLD = 0.15  # seconds; what a person does not notice, and ranks in step are apart
MOST_HELD = 4096  # lines


@dataclass
class _Entry:
    """A line that waits, and who has said it."""

    number: int
    text: bytes
    since: float
    ranks: set[int] = field(default_factory=set)


class Folder:
    """Folds the lines of one stream.

    Args:
        size: how many ranks there are.
        hold: seconds that a line waits for other ranks; 0 folds nothing.

    Example:
        >>> folder = Folder(2)
        >>> folder.feed(0, b"hello", now=0.0)
        >>> folder.feed(1, b"hello", now=0.1)
        >>> folder.take(now=0.1)
        [b'[2 ranks] hello']
    """

    def __init__(self, size: int, hold: float = HOLD) -> None:
        self._size = size
        self._hold = hold
        self._waiting: deque[_Entry] = deque()
        self._alike: defaultdict[bytes, list[_Entry]] = defaultdict(list)
        self._last: dict[int, int] = {}  # the number of the line that each rank has said last
        self._numbers = 0
        self._plain: list[bytes] = []  # lines that wait for nobody

    def feed(self, rank: int, text: bytes, now: float) -> None:
        """Takes one line of a rank."""
        if not self._hold:
            self._plain.append(b"[rank %d] %b" % (rank, text))
            return
        alike, last = self._alike[text], self._last.get(rank, 0)
        if alike and alike[-1].number > last:
            entry = alike[bisect_right(alike, last, key=lambda entry: entry.number)]
        else:
            self._numbers += 1
            entry = _Entry(self._numbers, text, now)
            self._waiting.append(entry)
            alike.append(entry)
        entry.ranks.add(rank)
        self._last[rank] = entry.number

    def take(self, now: float, *, everything: bool = False) -> list[bytes]:
        """Returns the lines that need wait no longer, as they are to be shown."""
        shown, self._plain = self._plain, []
        while self._waiting and (everything or self._is_ripe(self._waiting[0], now)):
            entry = self._waiting.popleft()
            alike = self._alike[entry.text]
            del alike[0]  # in the order of their numbers, as they wait
            if not alike:
                del self._alike[entry.text]
            shown.append(label(entry.ranks, self._size) + b" " + entry.text)
        return shown

    def _is_ripe(self, entry: _Entry, now: float) -> bool:
        return now - entry.since >= self._hold or len(entry.ranks) == self._size or len(self._waiting) > MOST_HELD

    def due(self) -> float | None:
        """Returns when the first line that waits need wait no longer; None where none waits for others."""
        return self._waiting[0].since + self._hold if self._waiting else None


def label(ranks: Collection[int], size: int) -> bytes:
    """Returns what stands before a line.

    >>> label({1}, 4), label({0, 1, 3}, 4), label({0, 1, 2, 3}, 4)
    (b'[rank 1]', b'[ranks 0-1, 3]', b'[4 ranks]')
    """
    if len(ranks) == 1:
        return b"[rank %d]" % next(iter(ranks))
    return f"[{size} ranks]".encode() if len(ranks) == size else f"[ranks {spans(sorted(ranks))}]".encode()
