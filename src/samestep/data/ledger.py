"""The ledger: which samples every committed step consumed, as a chain of digests small enough for a checkpoint.

A committed step is entered: its epoch, its positions in the order, and a digest over its indices and all indices
before them. The entry follows from the order alone, so it is the same on every rank, for any number of ranks, workers
and micro-batches. Steps that follow each other share a segment, which ends with its epoch, and where the batch size
changes or the run was resumed; so the ledger grows by some 60 bytes for each of those and not with the steps. A sample
that was skipped is listed in its segment, and is no part of the digest. `samestep.data.audit` replays all of it. Where
samples share a step because of their costs, a segment also has a tally: a sum over its samples that no order changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from samestep.data.order import Indices
from samestep.errors import DataError
from samestep.seeding import GOLDEN, splitmix64

LEDGER_VERSION = 1
DIGEST_BYTES = 16
START = hashlib.blake2b(f"samestep ledger {LEDGER_VERSION}".encode(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Skip:
    """A sample that could not be loaded and was left out: where it stood in the order, which it is, and why."""

    position: int
    index: int
    reason: str


@dataclass(frozen=True)
class Segment:
    epoch: int  # of all its steps
    start: int  # position at which the first of them starts
    stop: int  # position behind the last
    batch_size: int  # samples of a step; only the last may be shorter
    digest: bytes  # of everything up to its end
    skipped: tuple[Skip, ...] = ()  # positions in it that were not consumed
    bucket: str = ""  # how its steps were bucketed by cost, as a digest; "" where they were not
    tally: int = 0  # of its samples, where they were

    def row(self) -> tuple[Any, ...]:
        skipped = tuple((skip.position, skip.index, skip.reason) for skip in self.skipped)
        row = (self.epoch, self.start, self.stop, self.batch_size, self.digest.hex(), skipped)
        return (*row, self.bucket, f"{self.tally:x}") if self.bucket else row

    @staticmethod
    def of(row: Any) -> Segment:
        (epoch, start, stop, batch_size, digest, skipped), bucketed = row[:6], row[6:]
        skips = tuple(Skip(int(position), int(index), str(reason)) for position, index, reason in skipped)
        bucket, tally = bucketed or ("", "0")
        place = (int(epoch), int(start), int(stop), int(batch_size))
        return Segment(*place, bytes.fromhex(digest), skips, str(bucket), int(tally, 16))


def chain_digest(digest: bytes, epoch: int, indices: Indices) -> bytes:
    """Returns the digest of everything up to `digest`, and a step of these indices in this order: BLAKE2b.

    >>> import numpy as np
    >>> chain_digest(START, 0, np.array([1, 2])) == chain_digest(START, 0, np.array([2, 1]))
    False
    """
    state = hashlib.blake2b(digest, digest_size=DIGEST_BYTES)
    state.update(epoch.to_bytes(8, "little") + len(indices).to_bytes(8, "little"))
    state.update(indices.astype("<i8", order="C", copy=False).data)
    return state.digest()


def multiset_digest(indices: Indices) -> int:
    """Returns the sum of a word for each sample, the same in any order.

    >>> import numpy as np
    >>> multiset_digest(np.array([1, 2])) == multiset_digest(np.array([2, 1])) != multiset_digest(np.array([1, 3]))
    True
    """
    words = splitmix64(indices.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(GOLDEN))
    return (int((words >> np.uint64(32)).sum()) << 32) + int((words & np.uint64(0xFFFFFFFF)).sum())


class Ledger:
    """The committed steps of a run.

    Attributes:
        begins: epoch and position of the first step that it knows of; (0, 0) where it knows the whole run.
        digest: of all steps so far.
    """

    def __init__(self, begins: tuple[int, int] = (0, 0)) -> None:
        self.begins = begins
        self.digest = START
        self._closed: tuple[tuple[Any, ...], ...] = ()  # rows that change no more: a state shares them
        self._last: Segment | None = None

    @property
    def is_empty(self) -> bool:
        return self._last is None and not self._closed

    def enter(
        self,
        epoch: int,
        start: int,
        indices: Indices,
        *,
        batch_size: int,
        skipped: tuple[Skip, ...] = (),
        bucket: str = "",
    ) -> None:
        """Enters a committed step: its first position, and its samples over all ranks, those skipped included."""
        consumed = drop_skipped(indices, start, skipped)
        self.digest = chain_digest(self.digest, epoch, consumed)
        tally = multiset_digest(consumed) if bucket else 0
        last, stop = self._last, start + len(indices)
        here = (epoch, start, batch_size, bucket)
        if last is not None and (last.epoch, last.stop, last.batch_size, last.bucket) == here:
            both = last.skipped + skipped
            self._last = replace(last, stop=stop, digest=self.digest, skipped=both, tally=last.tally + tally)
            return
        self._closed = self._rows()
        self._last = Segment(epoch, start, stop, batch_size, self.digest, skipped, bucket, tally)

    def _rows(self) -> tuple[tuple[Any, ...], ...]:
        return self._closed if self._last is None else (*self._closed, self._last.row())

    def state(self) -> dict[str, Any]:
        return {
            "version": LEDGER_VERSION,
            "begins": self.begins,
            "digest": self.digest.hex(),
            "segments": self._rows(),
        }

    @staticmethod
    def of(state: Mapping[str, Any]) -> Ledger:
        """Returns a ledger that goes on where :meth:`state` was taken, in a new segment."""
        begins, digest, segments = parsed(state)
        ledger = Ledger(begins)
        ledger.digest = digest
        ledger._closed = tuple(segment.row() for segment in segments)
        return ledger


def parsed(state: Mapping[str, Any]) -> tuple[tuple[int, int], bytes, list[Segment]]:
    try:
        if (version := state["version"]) != LEDGER_VERSION:
            raise DataError(
                f"the data ledger has version {version}, this samestep reads {LEDGER_VERSION}; read it with the "
                "version that wrote it"
            )
        epoch, position = state["begins"]
        segments = [Segment.of(row) for row in state["segments"]]
        return (int(epoch), int(position)), bytes.fromhex(state["digest"]), segments
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the data ledger is malformed: {type(error).__name__}: {error}") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the data ledger is malformed: {error}") from error


def with_positions(skipped: tuple[Skip, ...], start: int, indices: Indices) -> tuple[Skip, ...]:
    """Returns the skipped samples of a step with their positions in the order: sorting by cost has changed them."""
    if not skipped:
        return skipped
    places = {int(index): start + place for place, index in enumerate(indices)}
    return tuple(
        sorted((replace(skip, position=places[skip.index]) for skip in skipped), key=lambda skip: skip.position)
    )


def drop_skipped(indices: Indices, start: int, skipped: tuple[Skip, ...]) -> Indices:
    """Returns a step's indices, the first of which stands at position `start`, without those skipped."""
    if not skipped:
        return indices
    gone = {skip.position for skip in skipped}
    return indices[[start + place not in gone for place in range(len(indices))]]
