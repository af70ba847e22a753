"""Whether the parts of parameters that ranks begin with are those of the whole that one process begins with.

    one process    a b c d        rank 0   a b        rank 1   a b   each has drawn its part, all seeded alike
                                           a b                 c e   only this one was changed behind the cut
                                           a b                 e f   each has cut its part out of a model of its own

Other numbers are no error by themselves: a model that is drawn otherwise is drawn as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestep.text import listed
from samestep.verification.findings import Finding
from samestep.verification.journal import place_of
from samestep.verification.judging.record import Record, part_at
from samestep.verification.judging.single import Run
from samestep.verification.judging.states import built_at, made
from samestep.verification.report import Report

__all__: list[str] = []

OWN_MODEL = "each has cut its parts out of a model of its own"


def judge(record: Record, whole: Run, report: Report) -> None:
    """Adds what the parts tell, where parameters are cut; `whole` is the script alone."""
    told = [one["kept"] for rank in whole.record.ranks for one in rank.of("own_start")]
    state = record.state(0)
    if not record.is_cut or not told or told[0] is None or state is None:
        return
    own = whole.record.value(0, told[0])
    ours = {name: value for theirs in state["parameters"].values() for name, value in theirs.items()}
    starts = [rank.of("start")[0]["parameters"] for rank in record.ranks if rank.of("start")]
    cut = [
        {
            name: digest
            for name, digest in start.items()
            if name in own and name in ours and place_of(digest) not in {"", "nowhere"}
        }
        for start in starts
    ]
    found = next((one for rule in (_copied, _changed) for one in rule(record, cut, own, ours)), None)
    report.add([] if found is None else [found])


def _copied(
    record: Record, starts: list[dict[str, str]], own: dict[str, Any], ours: dict[str, Any]
) -> Iterator[Finding]:
    """Whether ranks begin with the same numbers in different parts of a parameter, where one process draws others."""
    for rank, other in enumerate(starts[1:], 1):
        for name, digest in other.items():
            if (first := starts[0].get(name)) is None:
                continue
            places = place_of(first), place_of(digest)
            if places[0] == places[1] or first.removeprefix(places[0]) != digest.removeprefix(places[1]):
                continue
            mine, theirs = (part_at(own[name], place) for place in places)
            if part_at(ours[name], places[0]).unique().numel() > 1 and not mine.equal(theirs):
                yield _finding(
                    record,
                    rank,
                    name,
                    f"ranks {record.ranks[rank].number} and 0 begin with the same numbers in their parts of "
                    f"{name}; one process begins with different ones: each rank has drawn its part, all seeded alike, "
                    "or nothing fills them after to_empty()",
                    "draw whole tensors on every rank and shard them, or seed with the rank what fills the shards; "
                    "initialise every module that to_empty() leaves unfilled",
                )


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
        told = f"rank {record.ranks[rank].number} begins with other numbers than one process in its part of "
        if alike[rank]:
            told += f"{listed(names)}, and with the same in its other parts, as rank 0 does in all: it has changed them"
            fix = "load or change weights before they are cut over the ranks, or the parts of all ranks alike"
        else:
            told += f"{listed(names)}, and rank 0 with the same in all: {OWN_MODEL}"
            fix = "make one model on all ranks before it is cut: torch.manual_seed(seed), without the rank"
        yield _finding(record, rank, names[0], told, fix)


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
