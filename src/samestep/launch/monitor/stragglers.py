"""Which rank makes the others wait, and with what: its own work, or its data.

The last 20 samples of each rank, of a step or of 50 ms of steps, are compared with the median of the other ranks. Ranks
that wait are not slow. Evaluations, saves and loads are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from samestep.launch.monitor.heartbeat import StepTiming

SAMPLES = 20  # of a rank that are looked back on
FEWEST = 5  # steps of which something can be said
CLEAR = ((12, 12), (18, SAMPLES))  # so many of the last so many samples leave no doubt
DOUBT = 20, 5.0  # steps, and seconds, that a suspicion lasts where they do not
FACTOR = 1.4  # times the others' time
SHARE = 0.15  # of a step
NAMED = 1.1  # times the others' time, for a display
MORE = 1.15  # times the others' work: so much longer may it take
NETWORK = (-1, "messages")  # the suspect where no rank is one
CRAWLS = 0.7  # of a step in messages: the network is slow for them
CRAWL_S = 0.05  # seconds of such a step at least: short ones wait for latencies
AGAIN = 300.0  # seconds until a rank is named again


@dataclass(frozen=True)
class _Spent:
    """Seconds a step of one rank: the samples, and their medians, so that one long step is no slow rank."""

    step: int
    samples: Mapping[str, Sequence[float]]  # "whole", "own" and "data", and "work": what it works on in a step
    median: Mapping[str, float]


class Stragglers:
    def __init__(self) -> None:
        self._timings: dict[int, deque[StepTiming]] = {}
        self._spent: dict[int, _Spent] = {}  # of those whose timing has not changed since
        self._suspect: tuple[int, str] | bool = False
        self._since = 0, 0.0  # the step, and when, it came to be suspected
        self._seen: tuple[int, ...] = ()  # the steps of all ranks at the last look
        self._named: dict[tuple[int, str], float] = {}

    def add(self, timing: StepTiming) -> None:
        """Takes a rank's timing. A step that is no later than the one before begins anew: another attempt."""
        known = self._timings.setdefault(timing.rank, deque(maxlen=SAMPLES + 1))
        if known and timing.step <= known[-1].step:
            known.clear()
        known.append(timing)
        self._spent.pop(timing.rank, None)

    def found(self, ranks: Sequence[int], now: float) -> Iterator[tuple[str, list[int], str]]:
        """Yields events: kind, ranks, and what there is to say of them at this moment; `ranks` are all that train."""
        spent = self._spent_by(ranks)
        steps = tuple(each.step for each in spent.values())
        if len(spent) < len(ranks) or len(ranks) < 2 or steps == self._seen:
            return
        self._seen = steps
        slow = _slowest(spent)
        suspect = (_crawling(spent) and NETWORK) if slow is None else slow[:2]
        if suspect != self._suspect:
            self._suspect, self._since = suspect, (min(steps), now)
        lasts = min(steps) - self._since[0] >= DOUBT[0] and now - self._since[1] >= DOUBT[1]
        if not lasts and not (slow and _is_clear(*slow, spent)):
            return
        for rank, what in [one for one in self._named if one != suspect and one[0] in spent]:
            del self._named[rank, what]
            yield "keeps-up", [rank], f"rank {rank} is no longer slow"
        if suspect and now - self._named.get(suspect, -AGAIN) >= AGAIN:
            self._named[suspect] = now
            if slow is None:
                yield "network", [], _describe_network(spent)
            else:
                yield "straggler", [slow[0]], _describe(*slow, spent)

    def pace_summary(self, ranks: Sequence[int]) -> str:
        """Returns, for a progress display, how long these ranks wait for each other, and for whom; "" if unknown.

        "waiting 31%" is the mean share of a step that a rank waits for others or in messages; a slowest rank is named
        if its own work and data take a tenth longer than the median of the others'.
        """
        spent = self._spent_by(ranks)
        if len(spent) < len(ranks) or len(ranks) < 2:
            return ""
        busy = {rank: each.median["own"] + each.median["data"] for rank, each in spent.items()}
        wholes = {rank: each.median["whole"] for rank, each in spent.items()}
        waiting = fmean(1 - busy[rank] / whole if whole > 0 else 0.0 for rank, whole in wholes.items())
        slowest = max(busy, key=busy.__getitem__)
        others = median(seconds for rank, seconds in busy.items() if rank != slowest)
        times = busy[slowest] / others if others > 0 else 1.0
        named = f"  slowest rank {slowest} ({times:.1f}x)" if times >= NAMED else ""
        return f"waiting {max(0.0, waiting):.0%}{named}"

    def _spent_by(self, ranks: Sequence[int]) -> dict[int, _Spent]:
        for rank in ranks:
            if rank not in self._spent and (found := _spent_between(self._timings.get(rank, ()))) is not None:
                self._spent[rank] = found
        return {rank: self._spent[rank] for rank in ranks if rank in self._spent}


def _spent_between(timings: Sequence[StepTiming]) -> _Spent | None:
    if not timings or timings[-1].step - timings[0].step < FEWEST:
        return None
    samples: dict[str, list[float]] = {"whole": [], "own": [], "data": [], "work": []}
    for before, after in pairwise(timings):
        count = after.step - before.step
        whole = after.at - before.at - (after.non_training - before.non_training)
        data = after.data - before.data
        samples["whole"].append(whole / count)
        samples["own"].append(max(0.0, whole - data - (after.waited - before.waited)) / count)
        samples["data"].append(data / count)
        samples["work"].append((after.load - before.load) / count)
    return _Spent(timings[-1].step, samples, {name: median(values) for name, values in samples.items()})


def _slowest(spent: Mapping[int, _Spent]) -> tuple[int, str, float, float] | None:
    """Returns the rank that stands out most, with what, its time and the others'; None where none does."""
    worst = None
    for what in ("own", "data"):
        times = sorted(each.median[what] for each in spent.values())
        for rank, each in spent.items():
            mine, others = each.median[what], _median_without(times, each.median[what])
            further = worst is None or mine - others > worst[2] - worst[3]
            if further and _exceeds(mine, others, each.median["whole"]):
                worst = rank, what, mine, others
    return worst


def _exceeds(mine: float, others: float, whole: float) -> bool:
    return mine > FACTOR * others and mine - others > SHARE * whole


def _median_without(ordered: Sequence[float], one: float) -> float:
    """Returns the median of numbers in ascending order without one of them, of which it only takes the middle."""
    place, middle = bisect_left(ordered, one), (len(ordered) - 1) // 2
    left = [ordered[index + (index >= place)] for index in {middle, (len(ordered) - 2) // 2}]
    return fmean(left)


def _is_clear(rank: int, what: str, _: float, others: float, spent: Mapping[int, _Spent]) -> bool:
    samples = spent[rank].samples
    out = [_exceeds(mine, others, whole) for mine, whole in zip(samples[what], samples["whole"], strict=True)]
    return any(len(out) >= last and sum(out[-last:]) >= many for many, last in CLEAR)


def _crawling(spent: Mapping[int, _Spent]) -> bool:
    for one in (each.median for each in spent.values()):
        if one["whole"] < CRAWL_S or one["own"] + one["data"] > (1 - CRAWLS) * one["whole"]:
            return False
    return True


def _describe_network(spent: Mapping[int, _Spent]) -> str:
    whole = median(each.median["whole"] for each in spent.values())
    busy = median(each.median["own"] + each.median["data"] for each in spent.values())
    return (
        f"all ranks spend {1 - busy / whole:.0%} of a step ({_ms(whole)}) in messages, and none is slower than the "
        "others: the network is slow for what they exchange. Larger batches or micro-batches send less, and so does "
        "samestep.replicate(…, compress=…)"
    )


def _describe(rank: int, what: str, mine: float, others: float, spent: Mapping[int, _Spent]) -> str:
    times = f", {mine / others:.1f} times the others' {_ms(others)}" if others > 0 else ""
    lost = (mine - others) / spent[rank].median["whole"]
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


def _more_work(rank: int, spent: Mapping[int, _Spent]) -> float:
    """Returns how many times the others' work a rank has; 0 where that is not known, or no more."""
    others = median(each.median["work"] for one, each in spent.items() if one != rank)
    times = spent[rank].median["work"] / others if others > 0 else 0.0
    return times if times > MORE else 0.0


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.1f} ms"
