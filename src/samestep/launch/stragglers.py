"""Which rank makes the others wait, and with what: found from where each rank's time goes.

    a step of a rank    own work ── waiting for data ── waiting for others        evaluations, saves, loads: left out
                        of a straggler longer than of the others                  of the others: the difference

Compared are the last 20 steps of every rank, or more where those are over within a second, with the median of the
other ranks. A rank must stand out three times in a row, by 40 % and by 15 % of a step, before it is named; then once,
and again after five minutes, or when it keeps up. That ranks wait is no reason: who waits is not who is slow. A rank
whose work takes longer because there is more of it (samples, tokens, numbers in a batch) is told to have larger
batches: the user's own sampler deals them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from samestep.launch.pulse import Pace

__all__: list[str] = []

STEPS = 20  # that are looked back on
FEWEST = 5  # of which something can be said
FACTOR = 1.4  # times the others' time
SHARE = 0.15  # of a step
LOOKS = 3  # in a row
NAMED = 1.1  # times the others' time, for a display
MORE = 1.15  # times the others' work: so much longer may it take
NETWORK = (-1, "messages")  # who is suspected where no rank is
CRAWLS = 0.7  # of a step in messages: the network is slow for them
CRAWL_S = 0.05  # seconds of such a step at least: short ones wait for latencies that nobody can help
AGAIN = 300.0  # seconds until a rank is named again


@dataclass(frozen=True)
class _Spent:
    """Seconds a step of one rank, over its last steps."""

    step: int
    whole: float
    own: float
    data: float
    load: float = 0.0  # what it works on in a step


class Stragglers:
    """Watches the pace of all ranks."""

    def __init__(self) -> None:
        self._paces: dict[int, deque[Pace]] = {}
        self._suspect: tuple[int, str] | bool = False
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

    def found(self, ranks: Sequence[int], now: float) -> Iterator[tuple[str, list[int], str]]:
        """Yields events: kind, ranks, and what there is to say of them at this moment; `ranks` are all that train."""
        spent = {rank: found for rank in ranks if (found := _spent(self._paces.get(rank, ()))) is not None}
        steps = tuple(each.step for each in spent.values())
        if len(spent) < len(ranks) or len(ranks) < 2 or steps == self._seen:
            return
        self._seen = steps
        slow = _slowest(spent)
        suspect = (_crawling(spent) and NETWORK) if slow is None else slow[:2]
        self._looks = self._looks + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if self._looks < LOOKS:
            return
        for rank, what in [one for one in self._named if one != suspect and one[0] in spent]:
            del self._named[rank, what]
            yield "keeps-up", [rank], f"rank {rank} keeps up again"
        if suspect and now - self._named.get(suspect, -AGAIN) >= AGAIN:
            self._named[suspect] = now
            if slow is None:
                yield "network", [], _told_of_network(spent)
            else:
                yield "straggler", [slow[0]], _told(*slow, spent)

    def standing(self, ranks: Sequence[int]) -> str:
        """Returns, for a progress display, how long these ranks wait for each other, and for whom; "" if unknown.

        "waiting 31%" is the mean share of a step that a rank waits for others or in messages; a slowest rank is named
        if its own work and data take a tenth longer than the median of the others'.
        """
        spent = {rank: found for rank in ranks if (found := _spent(self._paces.get(rank, ()))) is not None}
        if len(spent) < len(ranks) or len(ranks) < 2:
            return ""
        busy = {rank: each.own + each.data for rank, each in spent.items()}
        waiting = fmean(1 - busy[rank] / each.whole if each.whole > 0 else 0.0 for rank, each in spent.items())
        slowest = max(busy, key=busy.__getitem__)
        others = median(seconds for rank, seconds in busy.items() if rank != slowest)
        times = busy[slowest] / others if others > 0 else 1.0
        named = f"  slowest rank {slowest} ({times:.1f}x)" if times >= NAMED else ""
        return f"waiting {max(0.0, waiting):.0%}{named}"


def _spent(paces: Sequence[Pace]) -> _Spent | None:
    """Returns what a step took: the median of what lies between two looks, so that one long step is no slow rank."""
    if not paces or paces[-1].step - paces[0].step < FEWEST:
        return None
    wholes, owns, datas, loads = [], [], [], []
    for before, after in pairwise(paces):
        count = after.step - before.step
        whole = after.at - before.at - (after.apart - before.apart)
        data = after.data - before.data
        wholes.append(whole / count)
        datas.append(data / count)
        loads.append((after.load - before.load) / count)
        owns.append(max(0.0, whole - data - (after.waited - before.waited)) / count)
    return _Spent(paces[-1].step, median(wholes), median(owns), median(datas), fmean(loads))


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


def _crawling(spent: dict[int, _Spent]) -> bool:
    """Whether all ranks spend most of their steps in messages."""
    return all(each.whole >= CRAWL_S and each.own + each.data <= (1 - CRAWLS) * each.whole for each in spent.values())


def _told_of_network(spent: dict[int, _Spent]) -> str:
    whole = median(each.whole for each in spent.values())
    busy = median(each.own + each.data for each in spent.values())
    return (
        f"all ranks spend {1 - busy / whole:.0%} of a step ({_ms(whole)}) in messages, and none is slower than the "
        "others: the network is slow for what they exchange. Larger batches or micro-batches send less, and so does "
        "samestep.replicate(…, compress=…)"
    )


def _told(rank: int, what: str, mine: float, others: float, spent: dict[int, _Spent]) -> str:
    times = f", {mine / others:.1f} times the others' {_ms(others)}" if others > 0 else ""
    lost = (mine - others) / spent[rank].whole
    many = "the others wait" if len(spent) > 2 else "the other waits"
    if what == "data":
        return (
            f"rank {rank} is slow: it waits {_ms(mine)} a step for data, the others {_ms(others)}; {many} for it "
            f"{lost:.0%} of the time"
        )
    more = _more_work(rank, spent)
    if more > 1 and mine <= MORE * more * others:
        return (
            f"rank {rank} has more to do: its batches are {more:.1f} times as large as the others', and take "
            f"{_ms(mine)} a step{times}; {many} for it {lost:.0%} of the time. Deal samples out by their cost, as "
            "samestep.shards(…, cost=…) does"
        )
    return f"rank {rank} is slow: its own work takes {_ms(mine)} a step{times}; {many} for it {lost:.0%} of the time"


def _more_work(rank: int, spent: dict[int, _Spent]) -> float:
    """Returns how many times the others' work a rank has; 0 where that is not known, or no more."""
    others = median(each.load for one, each in spent.items() if one != rank)
    times = spent[rank].load / others if others > 0 else 0.0
    return times if times > MORE else 0.0


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.1f} ms"
