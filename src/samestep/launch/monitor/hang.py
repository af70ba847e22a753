"""Whether a run hangs, which ranks hold it up, and since when.

A hang is no progress of any rank for max(10 s, 5 times the 99th percentile of a step). What takes long by right is
none: what comes before the second step, evaluations, saves, and computing while no other rank waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from samestep.launch.monitor.heartbeat import BACKWARD, RankHeartbeat
from samestep.progress import SHUTDOWN
from samestep.text import rank_list

DEADLOCK = "the ranks wait in different collectives, each for the others"  # so none is known to be the culprit
EACH = "every rank has to come by every collective (`samestep verify` says what each had called)"
HANG_AFTER_S = 10.0
TIMES = 5.0  # as long as nearly every step
LONGER = 6.0  # as long again, for the first steps, and evaluations, saves, loads that neither read, write nor compute
RECENT_S = 3.0  # within which what computes has been seen computing
FROZEN = {"T", "t"}
_LONG = {"evaluate", "save", "load"}

Kind = Literal["frozen", "busy", "disk", "asleep", "mismatch", "lost", "call"]


@dataclass(frozen=True, kw_only=True)
class Hang:
    kind: Kind  # what the culprits are; or different collectives, lost messages, a call of torch.distributed.rpc
    culprits: tuple[int, ...]  # the ranks that hold it up
    since_progress: float  # seconds since the last progress of any rank
    certain: bool  # it cannot go on by itself
    early: bool = False  # it computes, sleeps or reads before any rank's second step, where that may take long


def limit(ranks: Sequence[RankHeartbeat], least: float = HANG_AFTER_S) -> float:
    return max(least, TIMES * max((each.p99_step for each in ranks), default=0.0))


def diagnose(ranks: Sequence[RankHeartbeat], least: float = HANG_AFTER_S, behind: Sequence[int] = ()) -> Hang | None:
    """Returns what holds a run up; None where something progresses, or does long work.

    `behind` are the ranks that have not begun a collective in which others wait, as far as the flight recorder knows.
    """
    found = _diagnose(ranks, least, behind)
    if found is not None and found.kind in {"busy", "disk", "asleep"}:
        found = replace(found, early=_is_early(ranks))
    if found is None or found.kind not in {"busy", "asleep"} or not set(behind) < set(found.culprits):
        return found
    return replace(found, culprits=tuple(behind)) if behind else found


def is_doubtful(ranks: Sequence[RankHeartbeat], least: float = HANG_AFTER_S) -> bool:
    """Whether nothing progresses though all ranks compute: ranks that wait in a kernel of NCCL look like that."""
    since = min((each.since_progress for each in ranks), default=0.0)
    return since >= limit(ranks, least) and all(_is_busy(each) and not each.operation for each in ranks)


def _diagnose(ranks: Sequence[RankHeartbeat], least: float, behind: Sequence[int]) -> Hang | None:
    allowed = limit(ranks, least)
    since = min((each.since_progress for each in ranks), default=0.0)
    if since < allowed:
        return None
    frozen = [each for each in ranks if each.state in FROZEN]
    if frozen:
        return _hang("frozen", frozen, since)
    calling = [each for each in ranks if each.callee >= 0]
    if calling:
        timeout = LONGER * allowed if _is_early(ranks) else allowed
        return None if since < timeout else _hang("call", _not_returned(ranks, calling), since)
    ranks = [each for each in ranks if each.call != SHUTDOWN] or ranks
    inside, outside = [each for each in ranks if each.operation], [each for each in ranks if not each.operation]
    if not outside:
        return _all_in_collectives(inside, since)
    if _is_early(ranks) and (not inside or since < LONGER * allowed):
        return None
    if any(_works_long(each, allowed) for each in outside):
        return None
    busy, asleep = [one for one in outside if _is_busy(one)], [one for one in outside if not _is_busy(one)]
    if busy and (inside or asleep):
        return _hang("busy", busy, since)
    if busy:  # all compute; a rank that waits does so in a kernel
        return _hang("busy", busy, since) if behind else None
    disk = [each for each in asleep if each.state == "D"]
    return _hang("disk", disk, since) if disk else _hang("asleep", asleep if inside else _least_far(asleep), since)


def _is_early(ranks: Sequence[RankHeartbeat]) -> bool:
    return max(each.step for each in ranks) < 2


def _all_in_collectives(inside: Sequence[RankHeartbeat], since: float) -> Hang | None:
    if any(_is_busy(each) for each in inside):
        return None  # messages are on their way, or made
    if len({(each.entered, each.operation) for each in inside}) == 1:
        return _hang("lost", inside, since)
    return _hang("mismatch", _least_far(inside), since, certain=True)


def _not_returned(ranks: Sequence[RankHeartbeat], calling: Sequence[RankHeartbeat]) -> Sequence[RankHeartbeat]:
    """The ranks that are called and wait for no call themselves; without one, those that call."""
    called = {each.callee for each in calling}
    return [each for each in ranks if each.rank in called and each.callee < 0] or calling


def _least_far(ranks: Sequence[RankHeartbeat]) -> Sequence[RankHeartbeat]:
    """The ranks that have come least far: steps, and collectives, of which that of a backward pass has no number."""
    far = [(each.step, each.entered + (each.operation == BACKWARD)) for each in ranks]
    return [each for each, place in zip(ranks, far, strict=True) if place == min(far)]


def _is_busy(rank: RankHeartbeat) -> bool:
    return rank.since_activity < RECENT_S


def _works_long(rank: RankHeartbeat, allowed: float) -> bool:
    """Whether a rank does what may take long, and has made no progress there for not very long."""
    if rank.phase not in _LONG:
        return False
    return _is_busy(rank) or (rank.state != "D" and rank.since_progress < LONGER * allowed)


def _hang(kind: Kind, ranks: Sequence[RankHeartbeat], since: float, *, certain: bool = False) -> Hang:
    culprits = tuple(sorted(each.rank for each in ranks))
    return Hang(kind=kind, culprits=culprits, since_progress=since, certain=certain)


def describe_hang(
    hang: Hang, ranks: Mapping[int, RankHeartbeat], positions: Mapping[int, str], hosts: Mapping[int, str] | None = None
) -> list[str]:
    """Returns the report: which ranks are stuck, where, and what the others wait in.

    `positions` are their lines; `hosts` are their hosts, where there are several.
    """
    lines = [f"no progress for {hang.since_progress:.0f} s: {_headline(hang, ranks)}"]
    silent = [ranks[rank] for rank in hang.culprits if hang.kind == "call" and not ranks[rank].serving]
    answers = [each.rank for each in silent if each.callee < 0]
    groups: dict[str, list[int]] = {}
    for rank in (*hang.culprits, *(rank for rank in sorted(ranks) if rank not in hang.culprits)):
        groups.setdefault(_doing(ranks[rank], positions.get(rank), (hosts or {}).get(rank)), []).append(rank)
    lines += [f"    {rank_list(members)} {doing}" for doing, members in groups.items()]
    if answers:
        lines.append(f"    {rank_list(answers)}: the function has returned a future that is not complete yet")
    return lines


def _headline(hang: Hang, ranks: Mapping[int, RankHeartbeat]) -> str:
    who, several = rank_list(hang.culprits), len(hang.culprits) > 1
    are = "are" if several else "is"
    calls = list(dict.fromkeys(each.call for each in ranks.values() if each.callee in hang.culprits))
    others = [rank for rank in ranks if rank not in hang.culprits and (not calls or ranks[rank].callee >= 0)]
    waiting = f"{rank_list(others)} {'is' if len(others) == 1 else 'are'} waiting for {'them' if several else 'it'}"
    wait = f"; {waiting}" if others else ""
    return {
        "call": f"{who} {'have' if several else 'has'} not returned from {' and '.join(calls)}{wait}"
        if calls
        else "the ranks wait for calls of each other",
        "frozen": f"{who} {are} frozen, by SIGSTOP, Ctrl-Z or a debugger{wait}",
        "busy": f"{who} {are} computing but {'do' if several else 'does'} not finish a step{wait}",
        "disk": f"{who} {are} waiting for a disk{wait}",
        "asleep": f"{who} {are} asleep{wait}",
        "mismatch": f"{DEADLOCK}; {who} came less far; {EACH}" if others else f"{DEADLOCK}; {EACH}",
        "lost": "all ranks wait in the same collective, and no message arrives: is the network gone?",
    }[hang.kind]


def _doing(rank: RankHeartbeat, position: str | None, host: str | None) -> str:
    place = "" if position is None else f" at {position}"
    step = f"  (after step {rank.step})" if rank.step else ""
    if rank.state in FROZEN:
        there = "" if host is None else f" on {host}"
        return f"frozen, process {rank.pid}{there}: kill -CONT {rank.pid}{there} lets it go on{step}"
    if rank.operation:
        number = "" if rank.operation == BACKWARD else f", collective {rank.entered}"
        return f"in {rank.operation}{number}{place or (f' at {rank.site}' if rank.site else '')}{step}"
    if rank.serving:
        return f"in a call of {rank.serving}{place}{step}"
    if rank.callee >= 0:
        return f"waiting for {rank.call} on rank {rank.callee}{place or f' at {rank.call_site}'}{step}"
    if rank.call == SHUTDOWN:
        return f"in {SHUTDOWN}, serving calls{place}{step}"
    doing = "computing" if _is_busy(rank) else "waiting for a disk" if rank.state == "D" else "asleep"
    phase = f", in phase {rank.phase!r}" if rank.phase else ""
    return f"{doing}{place}{phase}{step}"
