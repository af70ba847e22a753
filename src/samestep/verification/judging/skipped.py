"""Which rank leaves out a batch that the others train on."""

from __future__ import annotations

from samestep.verification.judging.record import Rank, Record

__all__: list[str] = []


def skipper(record: Record) -> int | None:
    """Returns the first rank that goes on to its next batch without a backward pass where others have one."""
    told = [_used(rank) for rank in record.ranks]
    for used in zip(*told, strict=False):
        if True in used and False in used:
            return record.ranks[used.index(False)].number
    return None


def _used(rank: Rank) -> list[bool]:
    """Of each training batch but the last, whether a backward pass came before the next one."""
    used: list[bool] = []
    for event in rank.of("batch", "backward"):
        if event["kind"] == "batch" and event["training"]:
            used.append(False)
        elif event["kind"] == "backward" and used:
            used[-1] = True
    return used[:-1]
