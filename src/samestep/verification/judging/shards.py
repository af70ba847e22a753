"""Whether the parts of parameters that ranks begin with are those of the whole that one process begins with.

Other numbers are no error by themselves: ranks may draw the model in another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from samestep.text import listed
from samestep.verification.findings import Finding
from samestep.verification.journal import place_of
from samestep.verification.judging.record import Record, Run, beside_first, part_at
from samestep.verification.judging.states import built_at, made
from samestep.verification.report import Report

OWN_MODEL = "each has cut its parts out of a model of its own"


def judge(record: Record, whole: Run, report: Report) -> None:
    """Adds what the parts tell, where parameters are cut; `whole` is the script alone."""
    own = next((one["kept"] for one in whole.rank.of("own_start")), None)
    if not record.is_cut or own is None:
        return
    alone, ours = whole.record.value(0, own), record.parameters(0)
    cut = [
        {
            name: digest
            for name, digest in start["parameters"].items()
            if name in alone and name in ours and place_of(digest) not in {"", "nowhere"}
        }
        for start in record.first_of("start")
        if start is not None
    ]
    report.add(islice(chain(_copied(record, cut, alone, ours), _changed(record, cut, alone, ours)), 1))


def _copied(
    record: Record, starts: list[dict[str, str]], own: dict[str, Any], ours: dict[str, Any]
) -> Iterator[Finding]:
    """Whether ranks begin with the same numbers in different parts of a parameter, where one process draws others."""
    for rank, name, first, digest in beside_first(starts):
        places = place_of(first), place_of(digest)
        if places[0] == places[1] or first.removeprefix(places[0]) != digest.removeprefix(places[1]):
            continue
        mine, theirs = (part_at(own[name], place) for place in places)
        if part_at(ours[name], places[0]).unique().numel() > 1 and not mine.equal(theirs):
            cause = (
                f"ranks {record.ranks[rank].number} and 0 begin with the same numbers in their parts of {name}; one "
                "process begins with different ones: each rank has drawn its part, all seeded alike, or nothing fills "
                "them after to_empty()"
            )
            fix = (
                "draw whole tensors on every rank and shard them, or seed with the rank what fills the shards; "
                "initialise every module that to_empty() leaves unfilled"
            )
            yield _finding(record, rank, name, cause, fix)


def _changed(
    record: Record, starts: list[dict[str, str]], own: dict[str, Any], ours: dict[str, Any]
) -> Iterator[Finding]:
    """Whether a rank has other parts than one process, where the first rank's are one process's.

    Some of them it has changed, or each rank has cut its parts out of a model of its own. One part alone may be that of
    one process without that: ranks that draw their parts begin with the same numbers.
    """
    alike, apart = zip(*(_compared(start, own, ours) for start in starts), strict=True)
    for rank, names in enumerate(apart[1:], 1):
        if not names or not alike[0] or apart[0] or not (alike[rank] or len(alike[0]) > 1):
            continue
        number = record.ranks[rank].number
        cause = f"rank {number} begins with other numbers than one process in its part of {listed(names)}, and "
        if alike[rank]:
            cause += "with the same in its other parts, as rank 0 does in all: it has changed them"
            fix = "load or change weights before they are cut over the ranks, or the parts of all ranks alike"
        else:
            cause += f"rank 0 with the same in all: {OWN_MODEL}"
            fix = "make one model on all ranks before it is cut: torch.manual_seed(seed), without the rank"
        yield _finding(record, rank, names[0], cause, fix)


def _compared(start: dict[str, str], own: dict[str, Any], ours: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The parts of a rank that are one process's, of those that are drawn, and those that are not."""
    alike, apart = [], []
    for name, digest in start.items():
        mine, theirs = (part_at(one[name], place_of(digest)) for one in (ours, own))
        if not mine.equal(theirs):
            apart.append(name)
        elif theirs.unique().numel() > 1:
            alike.append(name)
    return alike, apart


def _finding(record: Record, rank: int, name: str, cause: str, fix: str) -> Finding:
    built = built_at(record.ranks[rank].of("wrap", "names"), name) if cause.endswith(OWN_MODEL) else None
    return Finding(
        code="initial-state-differs",
        rank=record.ranks[rank].number,
        step=0,
        tensor=name,
        where=built or made(record.ranks[0].events),
        cause=cause,
        fix=fix,
    )
