"""Whether the ranks begin with the buffers, and load the rows, of one process that loads its samples by itself.

Every other comparison gives one process what the ranks have loaded: features that are made from a rank's own part of
the data look right there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import REFUTED, Finding
from samestep.verification.journal import Event
from samestep.verification.judging import own_pace, rates
from samestep.verification.judging.passes import Pass, passes, together
from samestep.verification.judging.record import Rank, Record, place_of_draw
from samestep.verification.recording.evaluations import STATISTICS
from samestep.verification.recording.rows import rowed
from samestep.verification.report import Report

OWN_PART = "a rank's part of the data"
_PERMUTING = ("randperm", "permutation")  # which leave no sample out
_OTHERS = 0.01  # of the rows of a pass, and more than there are ranks: fewer may be chosen by rounded scores
_TAIL = 0.25  # of the rows of a pass that ranks may leave out, or repeat
_APART = 1e-3  # of a column's deviation
_OF_START = 1e-2  # of a parameter's norm
_ROUNDED = 1e-3  # of a column's largest number: smaller deviations are held against this
_MOST_ROWS = 1024  # of the ranks, whose values are looked at
_MOST_NUMBERS = 1 << 25  # of one process's rows


def judge(record: Record, alone: Record, report: Report) -> None:
    """Adds what differs; `alone` is one process at its own pace."""
    if alone.ranks and not {report.coverage.get(name) for name in ("data", "initial_state")} & {REFUTED}:
        report.add(_loaded(record, alone))
        report.add(_begun(record, alone))


def _loaded(record: Record, alone: Record) -> Iterator[Finding]:
    """The first pass in which the ranks load rows that one process does not."""
    theirs = {one.key: one for one in passes(alone.ranks[0])}
    for group in together(record.data):
        own = theirs.get(group[0].key)
        if own is None or not own.complete or not all(one.is_training for one in group):
            continue
        window = own.batches[0]["window"] if own.batches else 0
        is_known = not window or own_pace.go_together(record, alone, window)
        ours, others = _rows(group), _rows([own])
        are_as_many = not all(one.complete for one in group) or abs(len(ours) - len(others)) <= _TAIL * len(others)
        if not is_known or not ours or not others or not are_as_many or _vary(record, alone, group):
            continue
        count = _count_others(record, alone, ours, others)
        if count > max(_OTHERS * len(ours), record.size):
            yield _finding(group, own, count, len(ours), len(others))
            return


_Row = tuple[str, int, Event, int]  # digest, rank, batch, place in it


def _rows(group: Sequence[Pass]) -> list[_Row]:
    """The rows of a pass; none where a batch cannot be taken apart."""
    batches = [(one.rank, batch) for one in group for batch in one.batches]
    if any(len(batch["rows"]) != batch["size"] or batch["kept"] is None for _, batch in batches):
        return []
    return [(row, rank, batch, place) for rank, batch in batches for place, row in enumerate(batch["rows"])]


def _count_others(record: Record, alone: Record, ours: list[_Row], theirs: list[_Row]) -> int:
    """How many of the ranks' rows are none of one process's, also if values are rounded; 0 where that is not known."""
    known = {row for row, *_ in theirs}
    unknown = [one for one in ours if one[0] not in known]
    if not unknown:
        return 0
    looked_at = unknown[:: len(unknown) // _MOST_ROWS + 1]
    mine, others = _values(record, looked_at), _values(alone, theirs)
    if mine is None or others is None or mine.shape[1] != others.shape[1] or others.numel() > _MOST_NUMBERS:
        return 0
    centre, least = others.mean(0), _ROUNDED * others.abs().amax(0)  # a column of one number has no deviation
    scale = torch.maximum(others.std(0, correction=0), least).clamp_min(1e-12)
    mine, others = (mine - centre) / scale, (others - centre) / scale
    exactly = "donot_use_mm_for_euclid_dist"
    nearest = torch.cat([torch.cdist(part, others, compute_mode=exactly).amin(1) for part in torch.split(mine, 128)])
    others_of_looked_at = int((nearest > _APART * mine.shape[1] ** 0.5).sum())
    return len(unknown) * others_of_looked_at // len(looked_at)


def _values(record: Record, rows: list[_Row]) -> Tensor | None:
    """The numbers of rows, shape [rows, numbers]; None where they have unlike shapes."""
    batches: dict[tuple[int, int], list[Tensor]] = {}
    found = []
    for _, rank, batch, place in rows:
        number = (rank, batch["kept"])
        if number not in batches:
            batches[number] = [one for one in rowed(record.value(*number)) if one.shape[0] == batch["size"]]
        found.append(torch.cat([numerics.vector(one[place]) for one in batches[number]]))
    return torch.stack(found) if len({len(one) for one in found}) == 1 else None


def _vary(record: Record, alone: Record, group: Sequence[Pass]) -> bool:
    """Whether random numbers may make the rows, which each process draws, or the other samples of a batch."""
    name, processes = group[0].key, [*record.data.ranks, alone.ranks[0]]
    workers = [one for rank in processes for one in rank.of("worker") if one["key"] == name[0]]
    may_draw = group[0].about["workers"] and (not workers or any(one["used"] for one in workers))
    shown = [one for rank in processes for one in rank.of("fingerprint") if one["key"] == name[0]]
    is_mixed = any(one.get("mixed") for one in shown)
    if may_draw or is_mixed or group[0].about.get("replacement"):
        return True
    while_loading = any(
        (event["key"], event["number"]) == name for rank in processes for event in rank.of("noise", "draws_samples")
    )
    chosen = {event["digest"] for event in alone.ranks[0].of("order")}
    are_drawn = any(
        event["digest"] not in chosen and not event["name"].endswith(_PERMUTING)
        for rank in record.data.ranks
        for event in rank.of("order")
    )
    window = group[0].batches[0]["window"] if group[0].batches else 0
    are_drawn = are_drawn or any(map(_draws_for_samples, record.data.ranks))
    return while_loading or are_drawn or draw_otherwise(record, alone, window)


def _draws_for_samples(rank: Rank) -> bool:
    """Whether a line draws orders while samples are loaded more often than passes begin: parts of samples, say."""
    drawn = Counter(event["where"] for event in rank.of("order"))
    return max(drawn.values(), default=0) > max(len(rank.of("pass")), 1)


def draw_otherwise(record: Record, alone: Record, window: int, *, within: bool = False) -> bool:
    """Returns whether a rank has drawn what one process has not, or seeded a generator otherwise, up to a window.

    `within` says that draws count, too, which steps make of the samples that they have.
    """
    seeds = {event["seed"] for event in alone.ranks[0].of("seeded")}
    drawn = _drawn(alone.ranks[0], window, within=within)
    ranks = record.data.ranks
    is_seeded_otherwise = any(event["seed"] not in seeds for rank in ranks for event in rank.of("seeded"))
    return is_seeded_otherwise or any(_drawn(rank, window, within=within) != drawn for rank in ranks)


SEEDED_APART = (
    "each rank seeds a generator of its own, from whose methods it may draw, and one process has the numbers of rank 0"
)


def are_seeded_apart(record: Record) -> bool:
    """Returns whether ranks make, or seed, generators of their own otherwise; what these draw is not reported."""
    first, *others = ({event["seed"] for event in rank.of("seeded")} for rank in record.data.ranks)
    return any(seeds != first for seeds in others)


def draw_together(record: Record, alone: Record, window: int) -> bool:
    """Returns whether all ranks together have drawn what one process has, up to a window: each sample has its seed."""
    every = [_drawn(rank, window, within=True) for rank in (alone.ranks[0], *record.data.ranks)]
    whole, *parts = [Counter((place_of_draw({"place": at})[1], digest) for at, digest in drawn) for drawn in every]
    return bool(whole) and sum(parts, Counter()) == whole


def _drawn(rank: Rank, window: int, *, within: bool) -> list[tuple[str, str]]:
    """Places and digests of what a rank has drawn before a window is over."""
    return [
        (draw["place"], draw["digest"])
        for draw in rank.of("draw")
        if (within or not draw["within"]) and place_of_draw(draw)[0] <= window
    ]


def _finding(group: Sequence[Pass], own: Pass, count: int, ours: int, theirs: int) -> Finding:
    first = group[0]
    return Finding(
        code="datasets-differ",
        step=first.batches[0]["window"],
        where=first.about.get("made") or first.line,
        cause=f"{count:,} of {plural(ours, 'row')} that the ranks load in pass {own.number} are not among the "
        f"{theirs:,} that one process loads: what makes them, or chooses them, depends on {OWN_PART}",
        fix="compute what samples are made with, or chosen by (statistics, encodings, scores), from all data, or over "
        "all ranks, and divide the samples after that",
    )


def _begun(record: Record, alone: Record) -> Iterator[Finding]:
    """The first tensor that the ranks begin with otherwise, though their batches and draws are one process's.

    It is a buffer, or one of a few parameters: the others must be those of one process.
    """
    states = [one.state(0) for one in (record, alone)]
    if (
        None in states
        or record.is_cut
        or alone.is_cut
        or not rates.are_as_many(record, alone)
        or draw_otherwise(record, alone, 0)
    ):
        return
    ours, theirs = (_held(state) for state in states)
    if ours.keys() != theirs.keys():
        return
    errors = numerics.distance(ours, theirs).errors
    apart = [name for name, error in errors.items() if error > numerics.limit(0.0, ours)]
    if apart:
        if 2 * len(apart) <= len(ours) and all(errors[name] > _OF_START for name in apart):
            yield _begun_apart(apart[0], "", "the other parameters have the same")
        return
    mine, others = (state["buffers"] for state in states if state is not None)
    for name, buffer in mine.items():
        if not name.endswith(STATISTICS) and name in others and numerics.differ(buffer, others[name]):
            yield _begun_apart(name, "the buffer ", "all parameters have the same")
            return


def _begun_apart(name: str, kind: str, others: str) -> Finding:
    return Finding(
        code="initial-state-differs",
        tensor=name,
        step=0,
        cause=f"before the first step {kind}{name} has other values than in one process, and {others}: it is computed "
        f"from {OWN_PART}",
        fix="compute it from all data, or all_reduce what it is computed from, on every rank",
    )


def _held(state: Any) -> dict[str, Tensor]:
    return {name: one for parameters in state["parameters"].values() for name, one in parameters.items()}
