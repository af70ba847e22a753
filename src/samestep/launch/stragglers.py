"""Which rank makes the others wait, and with what: found from where each rank's time goes.

    a step of a rank    own work ── waiting for data ── waiting for others        evaluations, saves, loads: left out
                        of a straggler longer than of the others                  of the others: the difference

Compared are the last 20 steps of every rank, or more where those are over within a second, with the median of the
other ranks. A rank must stand out three times in a row, by 40 % and by 15 % of a step, before it is named; then once,
and again after five minutes, or when it keeps up. That ranks wait is no reason: who waits is not who is slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from samestep.launch.pulse import Pace

__all__: list[str] = []

STEPS = 20  # that are looked back on
FEWEST = 5  # of which something can be said
FACTOR = 1.4  # times the others' time
SHARE = 0.15  # of a step
LOOKS = 3  # in a row
AGAIN = 300.0  # seconds until a rank is named again


@dataclass(frozen=True)
class _Spent:
    """Seconds a step of one rank, over its last steps."""

    step: int
    whole: float
    own: float
    data: float


class Stragglers:
    """Watches the pace of all ranks."""

    def __init__(self) -> None:
        self._paces: dict[int, deque[Pace]] = {}
        self._suspect: tuple[int, str] | None = None
        self._looks = 0
        self._seen: tuple[int, ...] = ()  # the steps of all ranks at the last look
        self._named: dict[tuple[int, str], float] = {}

    def hear(self, pace: Pace) -> None:
        """Takes a rank's pace. A step that is no later than the one before begins anew: another attempt."""
        known = self._paces.setdefault(pace.rank, deque())
        if known and pace.step <= known[-1].step:
            known.clear()
        known.append(pace)
        while len(known) > 2 and known[-1].step - known[1].step >= STEPS:
            known.popleft()

    def found(self, ranks: Sequence[int], now: float) -> Iterator[str]:
        """Yields what there is to say of these ranks, all that train, at this moment."""
        spent = {rank: found for rank in ranks if (found := _spent(self._paces.get(rank, ()))) is not None}
        steps = tuple(each.step for each in spent.values())
        if len(spent) < len(ranks) or len(ranks) < 2 or steps == self._seen:
            return
        self._seen = steps
        slow = _slowest(spent)
        suspect = None if slow is None else slow[:2]
        self._looks = self._looks + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if self._looks < LOOKS:
            return
        for rank, what in [one for one in self._named if one != suspect and one[0] in spent]:
            del self._named[rank, what]
            yield f"rank {rank} keeps up again"
        if slow is not None and now - self._named.get(slow[:2], -AGAIN) >= AGAIN:
            self._named[slow[:2]] = now
            yield _told(*slow, spent)


def _spent(paces: Sequence[Pace]) -> _Spent | None:
    """Returns what a step took: the median of what lies between two looks, so that one long step is no slow rank."""
    if not paces or paces[-1].step - paces[0].step < FEWEST:
        return None
    wholes, owns, datas = [], [], []
    for before, after in pairwise(paces):
        count = after.step - before.step
        whole = after.at - before.at - (after.apart - before.apart)
        data = after.data - before.data
        wholes.append(whole / count)
        datas.append(data / count)
        owns.append(max(0.0, whole - data - (after.waited - before.waited)) / count)
    return _Spent(paces[-1].step, median(wholes), median(owns), median(datas))


def _slowest(spent: dict[int, _Spent]) -> tuple[int, str, float, float] | None:
    """Returns the rank that stands out most, with what, its time and the others'; None where none does."""
    worst = None
    for what in ("own", "data"):
        for rank, each in spent.items():
            mine = getattr(each, what)
            others = median(getattr(other, what) for one, other in spent.items() if one != rank)
            beyond = mine - others
            stands_out = mine > FACTOR * others and beyond > SHARE * each.whole
            if stands_out and (worst is None or beyond > worst[2] - worst[3]):
                worst = rank, what, mine, others
    return worst


def _told(rank: int, what: str, mine: float, others: float, spent: dict[int, _Spent]) -> str:
    times = f", {mine / others:.1f} times the others' {_ms(others)}" if others > 0 else ""
    lost = (mine - others) / spent[rank].whole
    many = "the others wait" if len(spent) > 2 else "the other waits"
    if what == "data":
        return (
            f"rank {rank} is slow: it waits {_ms(mine)} a step for data, the others {_ms(others)}; {many} for it "
            f"{lost:.0%} of the time"
        )
    return f"rank {rank} is slow: its own work takes {_ms(mine)} a step{times}; {many} for it {lost:.0%} of the time"


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.1f} ms"
