"""What ranks report every so many steps, through the process group's store. No rank waits for another.

A summary has a digest of each thing that must be equal. A :class:`SummaryDetail` goes with it, which rank 0 reads only
where digests differ. A rank that is far behind leaves summaries unread: each has SLOTS slots, used in turn.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from samestep.runtime.store_messages import decode_message

EVERY = 16  # steps of an optimizer
MAX_OPTIMIZERS = 8  # that write summaries; a script with one for each parameter would write as many as it has
SLOTS = 64  # summaries of a rank for an optimizer
_PREFIX = "samestep-check"
_TIMEOUT = timedelta(seconds=5)  # for the store to answer
_FINAL_S = 2.0  # that rank 0 waits for the others to end
_POLL_S = 0.005
_MAX_BACKOFF = 64  # steps

T = TypeVar("T", "StepSummary", "SummaryDetail", "FinalSummary")


@dataclass(frozen=True, kw_only=True)
class PassSummary:
    """What one pass over a DataLoader has yielded since the last summary, and was trained on."""

    key: str  # which loader
    number: int  # which of its passes, from 0
    size: int  # of the dataset
    sampler: str  # its type
    indices: str  # the samples, as base64 of 64-bit numbers
    repeated: int  # how many of this pass's samples the rank has had twice by itself
    steps: int  # of training since the pass began
    rows: dict[str, str]  # index -> digest of a few samples, by which two datasets are told apart


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """One rank's state before one step."""

    optimizer: int  # its number
    step: int  # how many it has taken before
    steps: list[int] = field(default_factory=list)  # of every optimizer
    rates: list[float] = field(default_factory=list)  # learning rates of the parameter groups
    # kind of event -> count and running digest: collectives of all ranks, scalers, schedules, and models in
    # DistributedDataParallel of all ranks
    streams: dict[str, list[int]] = field(default_factory=dict)
    names: str = ""  # digest of the optimizer's parameter names and shapes
    layout: str = ""  # digest of which parts of them the rank holds
    parameters: str = ""  # digest of these parts' values
    gradients: str = ""  # likewise; empty where there is none
    is_not_comparable: bool = False  # parameters are cut in a way in which parts cannot be compared
    is_wrapped: bool = False  # DistributedDataParallel of all ranks holds the model
    is_data_parallel: bool = False  # its wrapper, of whichever kind, lets every rank train on data of its own
    # DistributedDataParallel, and the last forward went through it, so gradients must be equal
    is_synchronised: bool = False
    spots: list[str] = field(default_factory=list)  # digests of one parameter before every step since the last summary
    passes: list[PassSummary] = field(default_factory=list)  # data that was trained on


@dataclass(frozen=True, kw_only=True)
class SummaryDetail:
    """The values behind a summary's digests."""

    # name -> digest, behind its place where the tensor is cut; None where there is none
    parameters: dict[str, str | None]
    gradients: dict[str, str | None]
    events: list[dict[str, Any]]  # the last ones, of the kinds and with the fields that verify records


@dataclass(frozen=True, kw_only=True)
class FinalSummary:
    """How a rank has ended: `well` says by the script's own end; `spots` are digests of one parameter an optimizer."""

    well: bool
    steps: list[int]
    where: str
    spots: dict[str, str]


Summary = StepSummary | SummaryDetail | FinalSummary


def encode(summary: Summary) -> str:
    return json.dumps(asdict(summary), separators=(",", ":"))


def decode(text: str | bytes, kind: type[T]) -> T:
    """Returns a summary of this kind, if it is one.

    Raises:
        RendezvousError: it is nothing that a rank writes.
    """
    fields = decode_message(text, kind, of="--check's summary of a rank")
    if kind is StepSummary:
        fields["passes"] = [PassSummary(**one) for one in fields["passes"]]
    return kind(**fields)


class SummaryExchange:
    """Sends a rank's summaries through the process group's store; on rank 0, receives those of all ranks."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store.clone()  # with a connection of its own: nothing that waits in the script's stands before it
        self._store.set_timeout(_TIMEOUT)
        self._rank = rank
        self._size = size
        self._pending: deque[tuple[StepSummary, SummaryDetail]] = deque(maxlen=SLOTS)
        self._skips = 0  # steps until the next look
        self._backoff = 0

    @classmethod
    def of_process_group(cls) -> SummaryExchange | None:
        """Returns one, or None where there is no process group, no store, or nobody else."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
            return None
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        return None if store is None else cls(store, dist.get_rank(), dist.get_world_size())

    def send(self, summary: StepSummary, detail: SummaryDetail) -> None:
        if self._rank == 0:
            self._pending.append((summary, detail))
            self._skips = self._backoff = 0
            return
        slot = _slot(summary)
        self._store.set(f"{slot}/{self._rank}/detail", encode(detail))
        self._store.set(f"{slot}/{self._rank}", encode(summary))

    def received(self) -> tuple[list[StepSummary], Callable[[int], SummaryDetail | None]] | None:
        """Returns the summaries of the first step of which all ranks' are there, in rank order; only on rank 0."""
        if not self._pending or self._skips:
            self._skips = max(0, self._skips - 1)
            return None
        slot = _slot(self._pending[0][0])
        keys = [f"{slot}/{rank}" for rank in range(1, self._size)]
        if not self._store.check(keys):
            self._backoff = min(2 * self._backoff + 1, _MAX_BACKOFF)
            self._skips = self._backoff
            return None
        self._backoff = 0
        summary, detail = self._pending.popleft()
        summaries = [summary, *(decode(value, StepSummary) for value in self._values(keys))]
        if len({one.step for one in summaries}) > 1:  # somebody has used the slot again: too far ahead
            return None
        return summaries, lambda rank: detail if rank == 0 else self._detail(f"{slot}/{rank}/detail")

    def free(self, summaries: list[StepSummary]) -> None:
        for rank in range(1, self._size):
            for end in ("", "/detail"):
                self._store.delete_key(f"{_slot(summaries[0])}/{rank}{end}")

    def poll_now(self) -> None:
        self._skips = 0

    def exchange_final(self, final: FinalSummary) -> list[FinalSummary] | None:
        """Reports how this rank has ended; on rank 0 returns how all have, None where one is not there for so long."""
        if self._rank:
            self._store.set(f"{_PREFIX}/final/{self._rank}", encode(final))
            return None
        keys = [f"{_PREFIX}/final/{rank}" for rank in range(1, self._size)]
        until = time.monotonic() + (_FINAL_S if final.well else 0.0)
        while not self._store.check(keys):
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_S)
        return [final, *(decode(value, FinalSummary) for value in self._values(keys))]

    def _values(self, keys: list[str]) -> list[bytes]:
        """Returns what is stored there; a file as a store has no way to ask for all at once."""
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]

    def _detail(self, key: str) -> SummaryDetail | None:
        return decode(self._store.get(key), SummaryDetail) if self._store.check([key]) else None


def _slot(summary: StepSummary) -> str:
    return f"{_PREFIX}/{summary.optimizer}.{summary.step // EVERY % SLOTS}"
