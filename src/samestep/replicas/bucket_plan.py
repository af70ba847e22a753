"""Into which buckets gradients are put, and when the last is reduced: integers and seconds, no tensors.

DistributedDataParallel reduces a bucket when its last gradient is ready and the bucket before it has been reduced. An
all-reduce of n bytes takes latency + n / bandwidth, so the end of the j-th gradient's all-reduce is at the earliest

    f(j) = min over i < j of  max(f(i), ready(j)) + latency + bytes(i .. j) / bandwidth                            [1]

which is computed from left to right. Of the partitions that end within half a percent of the earliest, the one with
the fewest buckets is taken [2]. Where the ranks add in the thread of the backward itself, as in shared memory on CPUs,
every all-reduce delays the gradients after it, which costs the same as if none were ready before the last [3].

Source: S. Shi et al., "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD", INFOCOM 2019, merge
gradients by the same model; [1] needs no assumption of theirs on where the merging stops.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from samestep.network.links import Link
from samestep.text import seconds_text

MIB = 1 << 20
DEFAULT_CAPS = (MIB, 25 * MIB)  # of DistributedDataParallel: the first bucket, and the others
SLACK = 1 / 200  # of the earliest end, which fewer buckets may cost
CAPS = 64  # that are tried where all buckets must have the same

BucketLayout = tuple[int, ...]  # where the buckets end, in gradients; the last is the number of gradients


@dataclass(frozen=True)
class BackwardProfile:
    """A backward, and what it takes to add its gradients."""

    sizes: tuple[int, ...]  # bytes of the gradients, each above 0, in the order in which they are put into buckets
    ready_s: tuple[float, ...]  # when each is ready on all ranks, in seconds from the start of the backward
    link: Link  # what an all-reduce takes, whatever it consists of
    beside: bool = True  # all-reduces run beside the backward; else in its thread
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _gates: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gates = itertools.accumulate(self.ready_s, max)  # a bucket is never added before the one before it
        last = max(self.ready_s)
        object.__setattr__(self, "_starts", (0, *itertools.accumulate(self.sizes)))
        object.__setattr__(self, "_gates", tuple(gates) if self.beside else (last,) * len(self.sizes))  # [3]

    @property
    def alone_s(self) -> float:
        return max(self.ready_s)

    def after(self, done_s: float, begin: int, end: int) -> float:
        """Returns when the bucket of gradients begin .. end is added, the one before it being added at `done_s`."""
        return max(done_s, self._gates[end - 1]) + self.link.seconds(self._starts[end] - self._starts[begin])

    def finish_s(self, layout: BucketLayout) -> float:
        """Returns when the last bucket of a layout is added.

        >>> backward = BackwardProfile((100, 100), (1.0, 2.0), Link(latency_s=0.1, bytes_per_s=200))
        >>> backward.finish_s((2,)), backward.finish_s((1, 2))
        (3.1, 2.6)
        """
        done = 0.0
        for begin, end in zip((0, *layout), layout, strict=False):
            done = self.after(done, begin, end)
        return done

    def adding_s(self, layout: BucketLayout) -> float:
        return sum(self.link.seconds(nbytes) for nbytes in self.buckets(layout))

    def buckets(self, layout: BucketLayout) -> tuple[int, ...]:
        return tuple(self._starts[end] - self._starts[begin] for begin, end in zip((0, *layout), layout, strict=False))


def ddp_layout(sizes: Sequence[int], caps: Sequence[int], *, from_the_end: bool = False) -> BucketLayout:
    """Returns the layout that DistributedDataParallel makes: a bucket ends with the gradient that fills it.

    Example:
        >>> ddp_layout((4, 4, 4, 4, 4), caps=(1, 8)), ddp_layout((4, 4, 4, 4, 4), caps=(1, 8), from_the_end=True)
        ((1, 3, 5), (2, 4, 5))
    """
    if from_the_end:
        begins = ddp_layout(sizes[::-1], caps)[:-1]
        return (*(len(sizes) - begin for begin in reversed(begins)), len(sizes))
    layout, filled, left = [], 0, list(caps)
    for position, size in enumerate(sizes, start=1):
        filled += size
        if filled >= left[0]:
            layout.append(position)
            filled, left = 0, left[1:] or left
    return tuple(layout) if layout and layout[-1] == len(sizes) else (*layout, len(sizes))


def optimal_layout(backward: BackwardProfile, slack: float = SLACK) -> BucketLayout:
    """Returns the layout with the fewest buckets of those that end within `slack` of the earliest end [2].

    >>> optimal_layout(BackwardProfile((10,) * 5, (1.0, 2.0, 3.0, 4.0, 5.0), Link(latency_s=0.5, bytes_per_s=100)))
    (4, 5)
    """
    count = len(backward.sizes)
    ends = [0.0]  # [1] of the first j gradients, at the earliest
    for j in range(1, count + 1):
        ends.append(_last(backward, ends, j)[0])
    most = ends[-1] * (1 + slack)
    ends = [0.0] + [math.inf] * count  # the same in k buckets
    begins: list[list[int]] = []
    while ends[-1] > most:
        best = [_last(backward, ends, j) for j in range(1, count + 1)]
        ends = [math.inf, *(end for end, _ in best)]
        begins.append([begin for _, begin in best])
    layout = [count]
    for of_bucket in reversed(begins[1:]):
        layout.append(of_bucket[layout[-1] - 1])
    return tuple(reversed(layout))


def best_single_size(backward: BackwardProfile, *, from_the_end: bool = False) -> int:
    """Returns the one cap, in bytes, for all buckets that ends earliest: all that torch before 2.13 can be told."""
    total = sum(backward.sizes)
    caps = [-(-total // number) for number in range(1, min(len(backward.sizes), CAPS) + 1)]
    return min(caps, key=lambda cap: backward.finish_s(ddp_layout(backward.sizes, (cap,), from_the_end=from_the_end)))


def coalesced(backward: BackwardProfile, most: int) -> BackwardProfile:
    """Returns the backward with neighbouring small gradients taken together, at most about `most` of them in all."""
    layout = ddp_layout(backward.sizes, (-(-sum(backward.sizes) // most),))
    ready = tuple(max(backward.ready_s[begin:end]) for begin, end in zip((0, *layout), layout, strict=False))
    return dataclasses.replace(backward, sizes=backward.buckets(layout), ready_s=ready)


def is_faster(ratios: Sequence[float]) -> tuple[bool, str]:
    """Returns whether proposed buckets win, and why, from their times over the default's, pair by pair.

    They must be faster in the median and in three pairs of four, so that what is no faster seldom wins, and what is
    slower by more than the pairs differ never does.

    >>> is_faster([0.9, 0.8, 0.95, 1.01])
    (True, 'the proposed buckets are taken: 7.5 % faster, first in 3 of 4 comparisons')
    """
    wins, faster = sum(ratio < 1 for ratio in ratios), 1 - median(ratios)
    takes = faster > 0 and 4 * wins >= 3 * len(ratios)
    by = f"{abs(100 * faster):.1f} % {'faster' if faster >= 0 else 'slower'}"
    kept = "the proposed buckets are taken: " if takes else "the default is kept: the proposed buckets were "
    return takes, f"{kept}{by}, first in {wins} of {len(ratios)} comparisons"


def _last(backward: BackwardProfile, ends: Sequence[float], j: int) -> tuple[float, int]:
    """When the first j gradients are added at the earliest, and with which one their last bucket begins."""
    return min((backward.after(ends[i], i, j), i) for i in range(j))


@dataclass(frozen=True)
class Partition:
    """One way to put the gradients into buckets, and what came of it.

    Attributes:
        buckets: bytes of each, in the order in which they are added.
        adding_s: seconds of all their all-reduces together, as predicted.
        finish_s: when the last was to be added, in seconds from the start of the backward.
        hidden: the share of the communication that was to be hidden behind the backward.
        achieved_s: when it was added; None where that was not measured.
        achieved_hidden: the share that was hidden, by the measured backward without communication and the predicted
            time of all all-reduces together; None also where they are done in the thread of the backward.
    """

    buckets: tuple[int, ...]
    adding_s: float
    finish_s: float
    hidden: float
    achieved_s: float | None = None
    achieved_hidden: float | None = None

    @staticmethod
    def predicted(backward: BackwardProfile, layout: BucketLayout) -> Partition:
        finish, adding = backward.finish_s(layout), backward.adding_s(layout)
        return Partition(backward.buckets(layout), adding, finish, _hidden(finish - backward.alone_s, adding))

    def achieved(self, backward: BackwardProfile, finish_s: float) -> Partition:
        hidden = _hidden(finish_s - backward.alone_s, self.adding_s) if backward.beside else None
        return dataclasses.replace(self, achieved_s=finish_s, achieved_hidden=hidden)

    def cells(self) -> tuple[str, str, str, str, str]:
        milliseconds = [
            _number(None if value is None else 1e3 * value, 1) for value in (self.finish_s, self.achieved_s)
        ]
        percent = [_number(None if value is None else 100 * value, 0) for value in (self.hidden, self.achieved_hidden)]
        return (_sizes(self.buckets), *milliseconds, *percent)  # type: ignore[return-value]


@dataclass(frozen=True)
class BucketPlan:
    """What `replicate(..., buckets="auto")` has found out and chosen; the same on every rank. `print` shows a table.

    Attributes:
        default: DistributedDataParallel's own buckets, of 25 MiB after a first one of 1 MiB.
        proposed: those that should end earliest.
        takes_proposed: whether they serve from now on, else the default does.
        reason: why, in words.
        alone_s: the backward without communication, in seconds.
        link: what an all-reduce takes: its latency, and bytes a second.
        beside: all-reduces run beside the backward; else in its thread, where nothing is hidden.
    """

    default: Partition
    proposed: Partition
    takes_proposed: bool
    reason: str
    alone_s: float
    link: Link
    beside: bool

    @property
    def chosen(self) -> Partition:
        """The buckets that serve from now on."""
        return self.proposed if self.takes_proposed else self.default

    def __str__(self) -> str:
        rows = [("", "buckets, MiB", "backward, ms", "achieved", "hidden, %", "achieved")]
        for name, partition in (("default", self.default), ("proposed", self.proposed)):
            rows.append((f"{name} *" if partition is self.chosen else name, *partition.cells()))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) if at < 2 else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        where = "beside the backward" if self.beside else "in the thread of the backward"
        taken = f"the backward alone {seconds_text(self.alone_s)}, an all-reduce {self.link}, {where}"
        return "\n".join([*lines, taken, f"* {self.reason}"])


def _hidden(exposed_s: float, adding_s: float) -> float:
    """The share of the communication that took no time of its own."""
    return min(1.0, max(0.0, 1 - exposed_s / adding_s)) if adding_s > 0 else 1.0


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _sizes(buckets: Sequence[int]) -> str:
    """Returns "1.0 18.0", or of many only how many and between which sizes."""
    texts = [f"{nbytes / MIB:.3g}" for nbytes in buckets]
    if len(texts) <= 6:
        return " ".join(texts)
    return f"{len(texts)} of {min(buckets) / MIB:.3g} to {max(buckets) / MIB:.3g}"
