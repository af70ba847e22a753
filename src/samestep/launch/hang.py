"""Whether a run hangs, who holds it up, and since when: said once, in words, when no rank moves any more.

    a rank is frozen (state T)                                  it, whoever waits
    some wait in a collective, others have not come             those: they compute, sleep, or wait for a disk
    all wait in collectives, and not in the same                each for others: nothing can go on any more
    all wait in the same                                        messages do not arrive
    none is in a collective that shows, and all sleep           the one that is behind

A hang is no move of any rank for max(10 s, 5 times the 99th percentile of a step). Long work is none: what happens
before the second step (compilation, a download), evaluations, saves, and whatever computes while nobody waits. What
others wait for before the second step is told of all the same, after six times as long, and never stopped. gloo and
NCCL give up after 30 and 10 minutes, and name nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from samestep.launch.pulse import BACKWARD, RankHeartbeat
from samestep.launch.verdict import MUTUAL
from samestep.text import rank_list

__all__: list[str] = []

EACH = "every rank has to come by every collective (`samestep verify` says what each had called)"
HANG_AFTER_S = 10.0  # seconds
TIMES = 5.0  # as long as nearly every step
LONGER = 6.0  # as long again, for the first steps, and evaluations, saves, loads that neither read, write nor compute
RECENT = 3.0  # seconds within which what computes has been seen computing
FROZEN = {"T", "t"}
_LONG = {"evaluate", "save", "load"}

Kind = Literal["frozen", "busy", "disk", "asleep", "mismatch", "lost"]


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A run in which nothing moves.

    Attributes:
        kind: of the ranks that hold it up: frozen, computing, waiting for a disk, asleep; or "mismatch" of collectives,
            or "lost" messages.
        culprits: those ranks.
        still: seconds since the last move of any rank.
        certain: whether it cannot go on by itself.
        early: whether it computes, sleeps or reads before any rank's second step, where that may take long.
    """

    kind: Kind
    culprits: tuple[int, ...]
    still: float
    certain: bool
    early: bool = False


def limit(pulses: Sequence[RankHeartbeat], least: float = HANG_AFTER_S) -> float:
    """Returns the seconds without a move after which a run may hang."""
    return max(least, TIMES * max((pulse.usual for pulse in pulses), default=0.0))


def diagnose(pulses: Sequence[RankHeartbeat], least: float = HANG_AFTER_S, missing: Sequence[int] = ()) -> Hang | None:
    """Returns what holds a run up; None where something moves, or does long work.

    Args:
        pulses: of all ranks that have not ended, the last of each.
        least: seconds without a move that are no hang, however short the steps are.
        missing: the ranks that have not begun a collective in which others wait, as far as the flight recorder knows.
    """
    found = _diagnosed(pulses, least, missing)
    if found is not None and found.kind in {"busy", "disk", "asleep"}:
        found = replace(found, early=_is_early(pulses))
    if found is None or found.kind not in {"busy", "asleep"} or not set(missing) < set(found.culprits):
        return found
    return replace(found, culprits=tuple(missing)) if missing else found


def is_doubtful(pulses: Sequence[RankHeartbeat], least: float = HANG_AFTER_S) -> bool:
    """Whether nothing moves though all ranks compute: whoever waits in a kernel of NCCL looks like that."""
    still = min((pulse.still for pulse in pulses), default=0.0)
    return still >= limit(pulses, least) and all(_is_busy(pulse) and not pulse.operation for pulse in pulses)


def _diagnosed(pulses: Sequence[RankHeartbeat], least: float, missing: Sequence[int]) -> Hang | None:
    patience = limit(pulses, least)
    still = min((pulse.still for pulse in pulses), default=0.0)
    if still < patience:
        return None
    frozen = [pulse for pulse in pulses if pulse.state in FROZEN]
    if frozen:
        return _hang("frozen", frozen, still)
    inside, outside = _parted(pulses)
    if not outside:
        return _between(inside, still)
    if _is_early(pulses) and (not inside or still < LONGER * patience):
        return None
    if any(_works_long(pulse, patience) for pulse in outside):
        return None
    busy, asleep = [one for one in outside if _is_busy(one)], [one for one in outside if not _is_busy(one)]
    if busy and (inside or asleep):
        return _hang("busy", busy, still)
    if busy:  # all compute; who waits all the same waits in a kernel
        return _hang("busy", busy, still) if missing else None
    disk = [pulse for pulse in asleep if pulse.state == "D"]
    return _hang("disk", disk, still) if disk else _hang("asleep", asleep if inside else _behind(asleep), still)


def _is_early(pulses: Sequence[RankHeartbeat]) -> bool:
    return max(pulse.step for pulse in pulses) < 2


def _parted(pulses: Sequence[RankHeartbeat]) -> tuple[list[RankHeartbeat], list[RankHeartbeat]]:
    return [pulse for pulse in pulses if pulse.operation], [pulse for pulse in pulses if not pulse.operation]


def _between(inside: Sequence[RankHeartbeat], still: float) -> Hang | None:
    """All are in collectives: who is in another than the rest?"""
    if any(_is_busy(pulse) for pulse in inside):
        return None  # messages are on their way, or made
    if len({(pulse.entered, pulse.operation) for pulse in inside}) == 1:
        return _hang("lost", inside, still)
    return _hang("mismatch", _behind(inside), still, certain=True)


def _behind(pulses: Sequence[RankHeartbeat]) -> Sequence[RankHeartbeat]:
    """The ranks that have come least far; all where none is behind the others."""
    least = min(map(_come, pulses))
    behind = [pulse for pulse in pulses if _come(pulse) == least]
    return behind if len(behind) < len(pulses) else pulses


def _come(pulse: RankHeartbeat) -> tuple[int, int]:
    """How far a rank has come: steps, and collectives, of which that of a backward pass has no number."""
    return pulse.step, pulse.entered + (pulse.operation == BACKWARD)


def _is_busy(pulse: RankHeartbeat) -> bool:
    return pulse.idle < RECENT


def _works_long(pulse: RankHeartbeat, patience: float) -> bool:
    """Whether a rank is at what may take long, and has not stood still there for very long."""
    if pulse.phase not in _LONG:
        return False
    return _is_busy(pulse) or (pulse.state != "D" and pulse.still < LONGER * patience)


def _hang(kind: Kind, pulses: Sequence[RankHeartbeat], still: float, *, certain: bool = False) -> Hang:
    return Hang(kind=kind, culprits=tuple(sorted(pulse.rank for pulse in pulses)), still=still, certain=certain)


def told(hang: Hang, pulses: Mapping[int, RankHeartbeat], standing: Mapping[int, str]) -> list[str]:
    """Returns what a person is told: who is stuck, where, and what the others wait in.

    Args:
        hang: what was found.
        pulses: of all ranks that have not ended.
        standing: by rank, its own line, where it is known.
    """
    lines = [f"no progress for {hang.still:.0f} s: {_headline(hang, pulses)}"]
    groups: dict[str, list[int]] = {}
    for rank in (*hang.culprits, *(rank for rank in sorted(pulses) if rank not in hang.culprits)):
        groups.setdefault(_doing(pulses[rank], standing.get(rank)), []).append(rank)
    return lines + [f"    {rank_list(ranks)} {doing}" for doing, ranks in groups.items()]


def _headline(hang: Hang, pulses: Mapping[int, RankHeartbeat]) -> str:
    who, several = rank_list(hang.culprits), len(hang.culprits) > 1
    are = "are" if several else "is"
    others = [rank for rank in pulses if rank not in hang.culprits]
    waiting = f"{rank_list(others)} {'is' if len(others) == 1 else 'are'} waiting for {'them' if several else 'it'}"
    wait = f"; {waiting}" if others else ""
    return {
        "frozen": f"{who} {are} frozen, by SIGSTOP, Ctrl-Z or a debugger{wait}",
        "busy": f"{who} {are} computing but {'do' if several else 'does'} not finish a step{wait}",
        "disk": f"{who} {are} waiting for a disk{wait}",
        "asleep": f"{who} {are} asleep{wait}",
        "mismatch": f"{MUTUAL}; {who} came less far; {EACH}" if others else f"{MUTUAL}; {EACH}",
        "lost": "all ranks wait in the same collective, and no message arrives: is the network gone?",
    }[hang.kind]


def _doing(pulse: RankHeartbeat, standing: str | None) -> str:
    place = "" if standing is None else f" at {standing}"
    step = f"  (after step {pulse.step})" if pulse.step else ""
    if pulse.state in FROZEN:
        return f"frozen, process {pulse.pid}: kill -CONT {pulse.pid} lets it go on{step}"
    if pulse.operation:
        number = "" if pulse.operation == BACKWARD else f", collective {pulse.entered}"
        return f"in {pulse.operation}{number}{place or (f' at {pulse.site}' if pulse.site else '')}{step}"
    doing = "computing" if _is_busy(pulse) else "waiting for a disk" if pulse.state == "D" else "asleep"
    phase = f", in phase {pulse.phase!r}" if pulse.phase else ""
    return f"{doing}{place}{phase}{step}"
