"""Each rank's share of a save: what it holds of the state, what of that it writes, and how rank 0 hears of it.

    rank 0   a [0:3]  b (copy)           a   rank 0 writes [0:3], rank 1 writes [3:5]
    rank 1   a [3:5]  b (copy)           b   the one of both that has less to write

What only one rank holds it writes. A box that several hold (Replicate) goes to the one that has least to write so far,
the largest first, so that no rank waits long for another. A state of which no tensor is cut among the ranks is rank
0's alone; to find that out costs one small exchange a save, a digest of what each rank holds of cut tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.grid import Box, boxes, grid_bounds
from samestep.checkpoints.manifest import ITEM_BYTES
from samestep.checkpoints.sharding import is_sharded, local_boxes
from samestep.checkpoints.writer import RemoteWriters, tensor_entry, write_shard
from samestep.errors import CheckpointError, RendezvousError
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.store_messages import decode_message
from samestep.runtime.world import World

HEARTBEAT_TIMEOUT_S = 30.0  # of a rank that writes, whose heartbeats arrive meanwhile
_SHORT_TIMEOUT_S = 5.0  # the same where this rank leaves because of an error, which may well be that rank's end
_HEARTBEAT_S = 1.0
_POLL_S = 0.02
_REPORTS = ({"error": str}, {"digests": dict[str, str]})


# --- the plan: pure data ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardReport:
    """What one rank holds of tensors that are cut among the ranks."""

    names: list[str]  # under which they are saved; those of the first rank count
    # {"dtype", "shape"} of the whole tensor, at every place, tied ones too
    forms: dict[str, dict[str, Any]] = field(default_factory=dict)
    # [offset, shape] of what this rank holds; without those of which it holds nothing
    boxes: dict[str, list[list[int]]] = field(default_factory=dict)
    other: int = 0  # bytes of what is not cut, which the first rank writes


def plan_writes(reports: Sequence[ShardReport]) -> dict[str, dict[str, Any]]:
    """Returns the entries of `Manifest.parts`, from the reports of all ranks in their order.

    What the first rank writes whole is no part, and has none.
    """
    names, forms = reports[0].names, reports[0].forms
    for rank, report in enumerate(reports):
        if missing := [name for name in report.names if name not in forms]:
            raise CheckpointError(f"cannot save {missing[0]}: it is cut on rank {rank}, and rank 0 has no such tensor")
    holders = {name: _holders(name, forms[name], reports) for name in names}
    writers = _assign_writers(holders, forms, [reports[0].other, *[0] * (len(reports) - 1)])
    found = {}
    for name, of in writers.items():
        bounds = grid_bounds(of, forms[name]["shape"])
        if bounds is None:
            raise CheckpointError(
                f"cannot save {name}: what the ranks hold of its shape {forms[name]['shape']} leaves a gap or overlaps"
            )
        ranks = [of[box] for box in boxes({"bounds": bounds})]
        if ranks != [0]:
            found[name] = {"bounds": bounds, "ranks": ranks}
    return found


def _holders(name: str, form: dict[str, Any], reports: Sequence[ShardReport]) -> dict[Box, list[int]]:
    """The boxes of one tensor, each with the ranks that hold it; none of a tensor without elements."""
    found = defaultdict(list)
    for rank, report in enumerate(reports):
        if report.forms.get(name, form) != form:
            raise CheckpointError(f"cannot save {name}: rank {rank} holds {report.forms[name]}, rank 0 holds {form}")
        if name in report.boxes:
            offset, shape = report.boxes[name]
            found[Box(tuple(offset), tuple(shape))].append(rank)
    return found


def _assign_writers(
    holders: dict[str, dict[Box, list[int]]], forms: dict[str, dict[str, Any]], loads: list[int]
) -> dict[str, dict[Box, int]]:
    """Each box with the rank that writes it. `loads` are the bytes of each rank before."""
    rows = [
        (len(ranks) > 1, -ITEM_BYTES[forms[name]["dtype"]] * math.prod(box.shape), name, box, ranks)
        for name, of in holders.items()
        for box, ranks in of.items()
    ]
    found: dict[str, dict[Box, int]] = {name: {} for name, of in holders.items() if of}
    for _, size, name, box, ranks in sorted(rows, key=lambda row: row[:2]):
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        found[name][box] = rank
        loads[rank] -= size
    return found


# --- what this rank holds -----------------------------------------------------------------------------------


class LocalShards:
    """What this rank holds of an encoded state. Whole tensors may be added to the encoder's afterwards."""

    def __init__(self, encoder: Encoder) -> None:
        self._tensors = encoder.tensors
        self._boxes = local_boxes(encoder.sharded)
        self.report = ShardReport(
            names=[name for name in self._tensors if name in encoder.sharded],
            forms={name: tensor_entry(tensor) for name, tensor in encoder.sharded.items()},
            boxes={name: [list(box.offset), list(box.shape)] for name, (box, _) in self._boxes.items()},
            other=sum(one.nbytes for name, one in self._tensors.items() if name not in encoder.sharded),
        )

    def entries(self) -> dict[str, dict[str, Any]]:
        """Returns the table of whole tensors for the manifest, without digests."""
        return {name: tensor_entry(tensor) for name, tensor in self._tensors.items()}

    def tensors_to_write(self, parts: dict[str, dict[str, Any]], rank: int) -> dict[str, Tensor]:
        """Returns what a rank, this one, writes: its boxes, and the first also what is no part."""
        own = {name: self._boxes[name][1] for name, grid in parts.items() if rank in grid["ranks"]}
        if rank == 0:
            own |= {name: self._whole(name) for name in self._tensors if name not in parts}
        return own

    def _whole(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if not is_sharded(tensor):
            return tensor
        return self._boxes[name][1] if name in self._boxes else torch.empty(tensor.shape, dtype=tensor.dtype)


class ShardedSave:
    """What the ranks of a run have agreed on; the `key` of their messages is no other checkpoint's of this process."""

    def __init__(self, world: World) -> None:
        self.key = ""
        self._world = world
        self._known = [""] * world.size
        self._parts: dict[str, dict[str, Any]] = {}
        self._reports: StoreReports | None = None
        self._saves = 0

    def plan(self, shards: LocalShards) -> dict[str, dict[str, Any]]:
        report = vars(shards.report)
        digest = hashlib.sha256(json.dumps(report).encode()).hexdigest() if shards.report.forms else ""
        known = all_gather_json(self._world.everyone, digest)
        if known != self._known:
            self._parts = plan_writes([ShardReport(**each) for each in all_gather_json(self._world.everyone, report)])
            self._known = known
        return self._parts

    def exchange(
        self, folder: Path, writers: list[int], tensors: dict[str, Tensor]
    ) -> tuple[RemoteWriters, Callable[[], Path]]:
        """Returns what the first rank knows of the others in the next save, and what such another one does in it."""
        self._saves += 1
        number, rank = self._saves, self._world.rank
        reports = self._reports = self._reports or StoreReports(rank, self.key)

        def write() -> Path:
            reports.report(number, lambda: write_shard(folder, rank, tensors))
            return folder

        return RemoteWriters(folder, lambda: reports.collect(number, writers)), write

    def shorten_timeout(self) -> None:
        """Lets the save under way give up soon on ranks that are silent."""
        if self._reports is not None:
            self._reports.shorten_timeout()


# --- reports to rank 0, through the store on which the ranks met --------------------------------------------


def parse_report(value: bytes, rank: int) -> dict[str, Any]:
    """Returns the report of a rank; what is malformed is the report of an error."""
    try:
        report: dict[str, Any] = decode_message(value, *_REPORTS, of=f"rank {rank}'s part of a checkpoint")
    except RendezvousError as error:
        return {"error": str(error)}
    return report


class StoreReports:
    """Sends the reports of some ranks' threads to the first one's, by names of the store that begin with `key`.

    Threads must not talk through a process group: their messages would fall between those of the training. The store's
    client is locked while a thread waits in it, so the threads have one of their own, and poll.
    """

    def __init__(self, rank: int, key: str) -> None:
        self._rank = rank
        self._key = key
        self._timeout = HEARTBEAT_TIMEOUT_S
        met: Any = _get_default_store()  # torch's stubs lack clone()
        self._store = met.clone()

    def report(self, number: int, write: Callable[[], dict[str, Any]]) -> None:
        """Sends what `write` returns, the report of this number, and heartbeats until then."""
        ended = threading.Event()
        heartbeat = threading.Thread(target=self._heartbeat, args=(number, ended), name="samestep-beat", daemon=True)
        heartbeat.start()
        try:
            report = write()
        finally:
            ended.set()
            heartbeat.join()
        self._store.set(self._name(number, self._rank), json.dumps(report))

    def collect(self, number: int, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Returns the report of this number of each of `ranks`; {"error": why} of one that is silent."""
        reports: dict[int, dict[str, Any]] = {}
        seen = dict.fromkeys(ranks, (0, time.monotonic()))
        while missing := [rank for rank in ranks if rank not in reports]:
            for rank in missing:
                name = self._name(number, rank)
                if self._store.check([name]):
                    reports[rank] = parse_report(self._store.get(name), rank)
                    for key in (name, f"{name}/beat"):
                        self._store.delete_key(key)
                    continue
                count = self._store.add(f"{name}/beat", 0)
                if count != seen[rank][0]:
                    seen[rank] = (count, time.monotonic())
                elif time.monotonic() - seen[rank][1] > self._timeout:
                    reports[rank] = {"error": f"no heartbeat for {self._timeout:g} s"}
            time.sleep(_POLL_S)
        return reports

    def shorten_timeout(self) -> None:
        """Lets :meth:`collect` wait no longer for a silent rank than this rank has, which is leaving."""
        self._timeout = min(self._timeout, _SHORT_TIMEOUT_S)

    def _heartbeat(self, number: int, ended: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # of a store that is gone, with whom the report was for
            while not ended.wait(_HEARTBEAT_S):
                self._store.add(f"{self._name(number, self._rank)}/beat", 1)

    def _name(self, number: int, rank: int) -> str:
        return f"samestep/checkpoint/{self._key}/{number}/{rank}"
