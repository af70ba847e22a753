"""The audit: whether a saved run consumed every sample once, worked out from its data state alone.

The order is a bijection of positions and samples, so what was consumed how often follows from the ledger's intervals;
that these were the samples, in this order, follows from the digests, which are computed again: 75 ns a sample and 2 us
a step on one core (75 s for 10^9 samples in large steps), in constant memory. Where samples that cost alike share a
step (`bucket=`), the digests need the costs; without them what the steps of whole windows add up to, their tally, is
compared with what the order put into these windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from samestep.data.costs import BucketedOrder, Buckets, Costs
from samestep.data.ledger import START, Segment, Skip, chain_digest, drop_skipped, multiset_digest, parsed
from samestep.data.order import BLOCK, ORDER_VERSION, UNKNOWN, Order, SampleOrder
from samestep.errors import DataError
from samestep.text import plural

_epoch = attrgetter("epoch")
MOST_NAMED = 3  # samples and skips named one by one

Span = tuple[int, int]


@dataclass(frozen=True)
class Audit:
    """What a data state says about its run.

    Attributes:
        ok: every sample was consumed as often as it should, but for those that are recorded as skipped.
        summary: a sentence.
        problems: what is not as it should, a sentence each.
    """

    ok: bool
    summary: str
    problems: tuple[str, ...] = ()


def audit(state: Mapping[str, Any], *, digests: bool = True, cost: Any = None) -> Audit:
    """Returns whether the run that saved `state` consumed every sample of every epoch exactly once.

    Args:
        state: what :meth:`samestep.Shards.state_dict` returned.
        digests: compute the digests again, 75 ns a sample; else only the positions are looked at, in no time.
        cost: what `shards` was given as `cost`, where it was also given `bucket`.

    Example:
        >>> import samestep, torch
        >>> data = torch.utils.data.TensorDataset(torch.arange(10))
        >>> with samestep.world() as world:
        ...     batches = samestep.shards(data, world, batch_size=4)
        ...     for _ in range(2):
        ...         for (x,) in batches:
        ...             batches.commit()
        ...     audit(batches.state_dict()).summary
        'every sample of 2 epochs exactly once'
    """
    try:
        saved = _SavedState.of(state, cost)
    except DataError as error:
        return Audit(ok=False, summary=f"cannot be audited: {error}", problems=(str(error),))
    problems = list(saved.problems())
    if digests and not problems:  # else the order of what is no interval would be asked for
        problems += saved.digest_problems()
        problems += saved.tally_problems()
    if problems:
        first = ", the first" if len(problems) > 1 else ""
        summary = f"{plural(len(problems), 'problem')}{first}: {problems[0]}"
        return Audit(ok=False, summary=summary, problems=tuple(problems))
    return Audit(ok=True, summary=saved.summary() + (saved.caveat() if digests else "; digests not computed again"))


@dataclass(frozen=True)
class _SavedState:
    size: int
    seed: int
    shuffle: bool
    drop_last: bool
    now: tuple[int, int]
    begins: tuple[int, int]
    digest: bytes
    segments: list[Segment]
    window: int  # samples that the steps under way are bucketed among; 1 without buckets
    buckets: Buckets | None  # None too where the costs were not given
    repeats: bool = False  # it was a stream, read anew for every part of it

    @staticmethod
    def of(state: Mapping[str, Any], cost: Any) -> _SavedState:
        if (version := state.get("order")) != ORDER_VERSION:
            raise DataError(f"its order has version {version}, this samestep knows {ORDER_VERSION}")
        if "ledger" not in state:
            raise DataError("no ledger was kept when it was saved; a run that resumes from it keeps one from there")
        try:
            seed, now = int(state["seed"]), (int(state["epoch"]), int(state["cursor"]))
            size = UNKNOWN if state["samples"] is None else int(state["samples"])
            shuffle, drop_last = bool(state["shuffle"]), bool(state.get("drop_last", False))
            bucket = state.get("bucket")
            window = 1 if bucket is None else int(bucket["steps"]) * int(bucket["batch_size"])
            buckets = None if bucket is None or cost is None else _buckets(bucket, cost, size, drop_last=drop_last)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the data state is malformed: {type(error).__name__}: {error}") from error
        saved = _SavedState(size, seed, shuffle, drop_last, now, *parsed(state["ledger"]), window, buckets)
        saved = replace(saved, repeats=state.get("stream") == "repeats")
        if window < 1 or not (
            (0, 0) <= saved.begins <= now and 0 <= saved.begins[1] <= size > 0 and 0 <= now[1] <= size
        ):
            raise DataError(f"the data state is malformed: from {saved.begins} to {now} of {size} samples")
        return saved

    def _order(self, epoch: int) -> SampleOrder:
        return SampleOrder(self.size, self.seed, epoch, self.shuffle)

    # --- positions -------------------------------------------------------------------------------

    def problems(self) -> Iterator[str]:
        wrong = [
            f"epoch {segment.epoch}: a segment [{segment.start}, {segment.stop}) in steps of {segment.batch_size} is "
            f"none of {self.size} samples"
            for segment in self.segments
            if not (0 <= segment.start < segment.stop <= self.size and segment.batch_size > 0 and segment.epoch >= 0)
        ]
        yield from wrong
        if wrong:
            return
        by_epoch = {
            epoch: list(parts)
            for epoch, parts in groupby(sorted(self.segments, key=attrgetter("epoch", "start")), _epoch)
        }
        for epoch in sorted({self.begins[0], self.now[0], *by_epoch}):
            yield from self._epoch_problems(epoch, by_epoch.get(epoch, []))
        yield from self._absent_epochs(set(by_epoch))
        for segment in self.segments:
            yield from self._skip_problems(segment)

    def _size(self, epoch: int) -> int:
        """Samples of a finished epoch; of a stream that does not say, those that it gave."""
        if self.size < UNKNOWN:
            return self.size
        return max((part.stop for part in self.segments if part.epoch == epoch), default=0)

    def _expected(self, epoch: int) -> Span:
        """The positions of an epoch that should have been consumed by now."""
        start = self.begins[1] if epoch == self.begins[0] else 0
        stop = self._size(epoch) if epoch < self.now[0] else self.now[1]
        return (start, stop) if self.begins[0] <= epoch <= self.now[0] else (0, 0)

    def _epoch_problems(self, epoch: int, segments: list[Segment]) -> Iterator[str]:
        if not self.begins[0] <= epoch <= self.now[0]:
            yield (
                f"epoch {epoch}: {sum(part.stop - part.start for part in segments)} samples consumed, though the "
                f"ledger begins at epoch {self.begins[0]} and the run stands at epoch {self.now[0]}"
            )
            return
        at, stop = self._expected(epoch)
        for segment in segments:
            if segment.start < at:
                yield self._describe(
                    epoch, (segment.start, min(at, segment.stop)), "consumed twice, or before the ledger"
                )
            elif at < min(segment.start, stop):
                yield self._describe(epoch, (at, min(segment.start, stop)), "missing")
            at = max(at, segment.stop)
        if at > stop:
            yield self._describe(epoch, (stop, at), f"consumed, though the run stands at position {stop}")
        elif at < stop and not self._left_out(epoch, segments):
            yield self._describe(epoch, (at, stop), "missing")

    def _absent_epochs(self, known: set[int]) -> Iterator[str]:
        """Whole epochs that nothing was consumed in, as one line: a malformed state may name 10^18 of them."""
        first, last = self.begins[0] + 1, self.now[0] - 1
        present = sorted(epoch for epoch in known if first <= epoch <= last)
        if (absent := max(0, last - first + 1) - len(present)) > 0:
            example = next(epoch for epoch in range(first, last + 1) if epoch not in known)
            yield f"{absent} whole {'epoch' if absent == 1 else 'epochs'} missing, the first is epoch {example}"

    def _left_out(self, epoch: int, segments: list[Segment]) -> bool:
        """Whether the rest of a finished epoch is one that `drop_last` leaves out."""
        if not (self.drop_last and epoch < self.now[0] and segments):
            return False
        return self.size - segments[-1].stop < segments[-1].batch_size

    def _skip_problems(self, segment: Segment) -> Iterator[str]:
        order = self._replayable(segment)
        for skip in segment.skipped:
            inside = segment.start <= skip.position < segment.stop and 0 <= skip.index < self.size
            if not inside or (order is not None and int(order.take(skip.position, skip.position + 1)[0]) != skip.index):
                yield f"epoch {segment.epoch}: index {skip.index} was not skipped at position {skip.position}"

    def _describe(self, epoch: int, span: Span, what: str) -> str:
        start, stop = span
        some = self._order(epoch).take(start, min(stop, start + MOST_NAMED)).tolist()
        named = ", ".join(f"index {index} (position {start + offset})" for offset, index in enumerate(some))
        rest = f" and {stop - start - len(some)} more" if stop - start > len(some) else ""
        count = "1 sample" if stop - start == 1 else f"{stop - start} samples"
        return f"epoch {epoch}: {count} {what}: {named}{rest}"

    # --- digests ---------------------------------------------------------------------------------

    def digest_problems(self) -> Iterator[str]:
        digest = START
        for segment in self.segments:
            order = self._replayable(segment)
            digest = segment.digest if order is None else _replayed(digest, segment, order)
            if digest != segment.digest:
                yield (
                    f"epoch {segment.epoch}: the samples of positions [{segment.start}, {segment.stop}) were not those "
                    f"of the order in steps of {segment.batch_size}: digest {segment.digest.hex()}, not {digest.hex()}"
                )
                digest = segment.digest
        if digest != self.digest:
            yield f"the ledger ends with digest {self.digest.hex()}, its last segment with {digest.hex()}"

    def _replayable(self, segment: Segment) -> Order | None:
        """The order that a segment's steps were cut from; None where it follows from costs that nobody gave."""
        order = self._order(segment.epoch)
        if not segment.bucket:
            return order
        return BucketedOrder(order, self.buckets) if self.buckets and self.buckets.name == segment.bucket else None

    def tally_problems(self) -> Iterator[str]:
        for (epoch, bucket), group in groupby(self.segments, lambda part: (part.epoch, part.bucket)):
            parts = list(group)
            start, stop = parts[0].start, parts[-1].stop
            if not bucket or self._replayable(parts[-1]) is not None or self._is_under_way(parts[-1]):
                continue
            gone = sum(multiset_digest(np.array([skip.index])) for part in parts for skip in part.skipped)
            order, ends = self._order(epoch), [*range(start, stop, BLOCK), stop]
            tally = sum(multiset_digest(order.take(*span)) for span in pairwise(ends))
            if sum(part.tally for part in parts) + gone != tally:
                yield f"epoch {epoch}: the samples of positions [{start}, {stop}) were not those of the order"

    def _is_under_way(self, segment: Segment) -> bool:
        """Whether a segment ends in mid-window, as only the last of a run does."""
        whole = segment.stop % self.window == 0 or segment.stop == self.size
        return bool(segment.bucket) and (segment.epoch, segment.stop) == self.now and not whole

    # --- words -----------------------------------------------------------------------------------

    def summary(self) -> str:
        epoch, cursor = self.now
        start, stop = self._expected(epoch)
        at_end = start == 0 and cursor == self._end()
        whole = max(0, epoch - self.begins[0] - (self.begins[1] > 0)) + at_end
        given = "that the stream gave in" if self.size == UNKNOWN else "of"
        parts = [f"every sample {given} {plural(whole, 'epoch')} exactly once{self._exceptions()}"] if whole else []
        if stop > start and not at_end:
            each = "" if whole else f", each exactly once{self._exceptions()}"
            of = "" if self.size == UNKNOWN else f" of {self.size}"
            parts.append(f"epoch {epoch}: {stop - start}{of} so far{each}")
        elif not whole:
            parts.append(f"each sample so far exactly once{self._exceptions()}" if self.segments else "no step so far")
        if self.begins != (0, 0):
            parts.append(f"the ledger begins at epoch {self.begins[0]}, position {self.begins[1]}")
        return "; ".join(parts)

    def caveat(self) -> str:
        if self.repeats:
            return ", if the stream gives the same items each time"
        if all(self._replayable(segment) is not None for segment in self.segments):
            return ""
        text = "; which samples shared a step follows from their costs, not given here"
        if self._is_under_way(self.segments[-1]):
            text += "; of the window under way only the positions are known"
        return text

    def _end(self) -> int:
        """One past the last position that the epoch under way will use."""
        batch_size = self.segments[-1].batch_size if self.segments else self.size
        return self.size - self.size % batch_size if self.drop_last else self.size

    def _exceptions(self) -> str:
        ends = {epoch: max(part.stop for part in parts) for epoch, parts in groupby(self.segments, _epoch)}
        dropped = sum(self._size(epoch) - end for epoch, end in ends.items() if epoch < self.now[0])
        left = f" but for {dropped} left out by drop_last" if dropped else ""
        skips = [(segment.epoch, skip) for segment in self.segments for skip in segment.skipped]
        if not skips:
            return left
        named = ", ".join(f"index {skip.index} (epoch {epoch}: {skip.reason})" for epoch, skip in skips[:MOST_NAMED])
        rest = f" and {len(skips) - MOST_NAMED} more" if len(skips) > MOST_NAMED else ""
        return f"{left} except {len(skips)} skipped: {named}{rest}"


def _replayed(digest: bytes, segment: Segment, order: Order) -> bytes:
    skips = list(segment.skipped)
    for start in range(segment.start, segment.stop, segment.batch_size):
        stop = min(start + segment.batch_size, segment.stop)
        mine: list[Skip] = []
        while skips and skips[0].position < stop:
            mine.append(skips.pop(0))
        digest = chain_digest(digest, segment.epoch, drop_skipped(order.take(start, stop), start, tuple(mine)))
    return digest


def _buckets(bucket: Mapping[str, Any], cost: Any, size: int, *, drop_last: bool) -> Buckets:
    steps, batch_size = int(bucket["steps"]), int(bucket["batch_size"])
    costs = Costs(cost, size)
    if costs.digest != bucket["costs"]:
        raise DataError("cost= gives other costs than those of the run")
    return Buckets(costs, steps, batch_size, size - size % batch_size if drop_last else size)
