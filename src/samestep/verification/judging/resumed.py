"""Whether a pass that was under way when a state was saved goes on, behind the load, with what it had not used yet.

before the save     0 1 2 3 4 │                 used: 0-4
behind the load     0 1 2 3 4 │ 5 6 7 …         skipped: 0-4, as many as were used; more are never used, fewer twice
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from samestep.text import plural
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record, line_of, pass_of


@dataclass
class _Pass:
    """A training pass of one rank, as far as it has gone."""

    where: str
    line: str
    batches: list[Event] = field(default_factory=list)  # that it has yielded
    early: int = 0  # how many it had yielded when the first backward pass began
    backwards: int = 0  # that have begun since
    length: int | None = None  # how many it yields
    is_over: bool = False


@dataclass(frozen=True)
class Resumed:
    """A pass that begins after a load."""

    where: str
    used: list[Event]  # batches that were used before the save, of the pass that was under way then
    skipped: list[Event]  # batches that it yields before it trains
    trained: Event | None  # the first batch that it trains on


def resumed(rank: Rank) -> Iterator[Resumed]:
    """Yields the first training pass behind each load of what the rank has saved."""
    begun: dict[tuple[str, int], _Pass] = {}
    going: _Pass | None = None  # the one whose batch was yielded last
    usual: dict[str, int] = {}  # line of a loader -> how many batches a pass over it yields before it trains
    saved: list[tuple[Event, list[Event]]] = []
    due: list[Event] | None = None  # what was used before the save that has just been loaded
    found: list[tuple[_Pass, list[Event]]] = []
    for event in rank.of("pass", "batch", "backward", "passed", "save", "load"):
        kind, name = event["kind"], (event.get("key", ""), event.get("number", 0))
        if kind == "pass":
            begun[name] = _Pass(event["where"], line_of(event["key"]), length=event.get("length"))
        elif kind == "batch" and event["training"] and name in begun:
            going = begun[name]
            going.batches.append(event)
            going.is_over = len(going.batches) == going.length
        elif kind == "backward" and going is not None:
            if not going.backwards:
                going.early = len(going.batches)
                if due is not None:
                    found.append((going, due))
                    due = None
                else:
                    usual.setdefault(going.line, going.early)
            going.backwards += 1
        elif kind == "passed" and name in begun:
            begun[name].is_over = True
        elif kind == "save":
            saved.append((event, _used(going, usual)))
        elif kind == "load":
            known = [batches for save, batches in saved if same(save["digests"], event["digests"])]
            due = known[-1] if known else None
    for one, used in found:
        skipped = max(one.early - usual.get(one.line, 1), 0)
        trained = one.batches[skipped] if one.backwards else None
        yield Resumed(one.where, used, one.batches[:skipped], trained)


def same(first: dict[str, str], other: dict[str, str]) -> bool:
    """Returns whether two states hold the same tensors, whatever they are called."""
    return sorted(first.values()) == sorted(other.values())


def _used(going: _Pass | None, usual: dict[str, int]) -> list[Event]:
    """The batches of a pass that it has trained on so far; none of one that is over."""
    if going is None or not going.backwards:
        return []
    skipped = max(going.early - usual.get(going.line, going.early), 0)
    if going.is_over and skipped + going.backwards >= len(going.batches):
        return []
    return going.batches[skipped : skipped + going.backwards]


def judge(record: Record, own_pace: Callable[[], Record] | None = None) -> Iterator[Finding]:
    """Yields the first pass that begins at another place than where its training was saved.

    Where samples have no index, or a sampler begins behind what it skips, one process at its own pace, `own_pace`,
    tells which of them a step uses.
    """
    behind = []
    for rank in record.ranks:
        behind += (passes := [*resumed(rank)])
        if found := next(filter(None, (_elsewhere(rank, one) for one in passes)), None):
            yield found
            return
    skips_unseen = any(one.used and not one.skipped and one.trained is not None for one in behind)
    is_unknown = all(batch["indices"] is None for rank in record.ranks for batch in rank.of("batch"))
    if own_pace is not None and (is_unknown or skips_unseen) and record.ranks and record.steps:
        yield from _others_behind(record, own_pace)


def _elsewhere(rank: Rank, one: Resumed) -> Finding | None:
    """Returns the finding for a pass that does not go on where its training was saved."""
    if any(batch["indices"] is None for batch in [*one.used, *one.skipped]):
        return None
    used, skipped = ({index for batch in each for index in batch["indices"]} for each in (one.used, one.skipped))
    loaded = f"a state was saved after {plural(len(one.used), 'batch')} of an epoch, and when it was loaded"
    were_skipped = f"{loaded} {len(one.skipped)} were skipped"
    if used and not skipped:
        if one.trained is None or one.trained["indices"] != one.used[0]["indices"]:
            return None
        is_chosen = any(pass_of(event) == pass_of(one.trained) for event in rank.of("chosen"))
        if is_chosen and one.trained["rows"] != one.used[0]["rows"]:
            return None  # a Subset of what is left counts from 0 again
        cause = f"{loaded} the epoch began again with the first of them"
    elif skipped - used:
        return Finding(
            code="samples-missing",
            rank=rank.number,
            where=one.where,
            cause=f"{were_skipped}: {plural(len(skipped - used), 'sample')} of rank {rank.number} are trained on in no "
            "step of it",
            fix="count what is skipped in the unit in which it was saved: batches of one rank, or samples of all ranks",
        )
    elif used - skipped:
        cause = f"{were_skipped}: {plural(len(used - skipped), 'sample')} of rank {rank.number} are trained on twice"
    else:
        return None
    fix = "skip what was used, or save the position in the data: samestep.checkpoint(…, data=batches) does"
    return Finding(code="samples-repeated", rank=rank.number, where=one.where, cause=cause, fix=fix)


def _others_behind(record: Record, own_pace: Callable[[], Record]) -> Iterator[Finding]:
    """Whether ranks together use one process's samples at every step before a load, and others behind it."""
    resumed_at = [event["event"] for event in record.ranks[0].of("resumed") if 1 < event["event"] < record.steps]
    if not resumed_at or not record.is_alike:
        return
    first = record.ranks[0].steps[resumed_at[0]]
    before = {step["window"] for step in record.ranks[0].steps if step["event"] < first["event"]}
    alone = own_pace()
    if len(before) < 2 or rows(record, before) != rows(alone, before):
        return
    mine, theirs = (rows(one, {first["window"]}) for one in (record, alone))
    if mine and theirs and mine != theirs:
        used = {row for _, row in rows(record, before)}
        again = sum(row in used for _, row in mine)
        passes = [event for event in record.ranks[0].events if event["kind"] in {"pass", "resumed"}]
        begun = [one["where"] for one, then in pairwise(passes) if one["kind"] == "pass" and then["kind"] == "resumed"]
        about: dict[str, Any] = {
            "step": first["event"],
            "where": begun[-1] if begun else record.ranks[0].backward_of(first),
            "fix": "count what is skipped in the unit in which it was saved: samples of one rank, or of all ranks",
        }
        cause = (
            f"until step {first['event']} the ranks together use one process's samples at every step, and behind the "
            "load others"
        )
        if again:
            cause += f", {plural(again, 'sample')} of them for the second time"
            yield Finding(code="samples-repeated", cause=cause, **about)
        else:
            yield Finding(code="samples-missing", cause=cause, **about)


def rows(record: Record, windows: set[int]) -> set[tuple[int, str]]:
    """Returns the samples that were used in some windows, with the window."""
    batches = [one for rank in record.data.ranks for one in rank.of("batch", "input") if one["window"] in windows]
    loaded = [one for one in batches if one["kind"] == "batch" and one["training"]]
    return {(one["window"], row) for one in loaded or batches for row in one["rows"]}
