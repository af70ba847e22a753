"""What torch's flight recorder knows of a rank's collectives: also of those that no script calls.

A rank that waits in a kernel of NCCL seems to compute; the recorder shows that it has begun a collective that the
culprit has not. Torch's own analyzer wants dumps of all ranks in one place, and fails on those of gloo.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CollectiveRecord:
    """The last collective that a rank has begun in a process group."""

    rank: int
    group: str  # its name and what torch calls it
    number: int  # how many it has begun there
    operation: str  # such as "all_reduce"
    sizes: str  # of its inputs
    done: bool

    def __str__(self) -> str:
        sizes = f" of {self.sizes}" if self.sizes else ""
        return f"collective {self.number}, {self.operation}{sizes}, {'done' if self.done else 'not done'}"


def last_collectives() -> list[dict[str, Any]]:
    """Returns the last collective of each of this process's groups, the latest last; the launcher adds the rank.

    Without a process group the recorder is not asked: ranks that only call each other (torch.distributed.rpc) were seen
    to crash in it.
    """
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if dump is None or groups is None or not groups._world.pg_map:  # noqa: SLF001
        return []
    lasts: dict[str, dict[str, Any]] = {}
    for entry in json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", []):
        if not entry["is_p2p"]:
            lasts.pop(group := str(entry["process_group"]), None)
            lasts[group] = _fields(entry)
    return list(lasts.values())


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "group": " ".join(dict.fromkeys(map(str, entry["process_group"]))),
        "number": int(entry["collective_seq_id"]),
        "operation": str(entry["profiling_name"]).rpartition(":")[2],
        "sizes": ", ".join(str(size) if size else "a scalar" for size in entry["input_sizes"]),
        "done": bool(entry["retired"]) or entry["state"] == "completed",
    }


def ranks_behind(records: Sequence[CollectiveRecord]) -> tuple[int, ...]:
    """Returns the ranks that have not begun what others wait for; none where that does not show.

    >>> same = {"group": "0", "operation": "all_reduce", "sizes": ""}
    >>> zero = CollectiveRecord(rank=0, number=41, done=False, **same)
    >>> ranks_behind([zero, CollectiveRecord(rank=1, number=40, done=True, **same)])
    (1,)
    """
    for _, members in _groups(records):
        most = max(one.number for one in members)
        if any(one.number == most and not one.done for one in members):
            behind = tuple(one.rank for one in members if one.number < most)
            if behind:
                return behind
    return ()


def recorder_lines(records: Sequence[CollectiveRecord]) -> list[str]:
    return [
        f"flight recorder, group {group}: " + "; ".join(f"rank {one.rank} {one}" for one in members)
        for group, members in _groups(records)
        if not all(one.done for one in members) or len({one.number for one in members}) > 1
    ]


def _groups(records: Sequence[CollectiveRecord]) -> Iterator[tuple[str, list[CollectiveRecord]]]:
    for group in dict.fromkeys(one.group for one in records):
        yield group, sorted((one for one in records if one.group == group), key=lambda one: one.rank)
