"""Finds the line at which ranks first compute something else than one process does, from the same samples and weights.

    one process    a
    ranks          r₀ … r_N      copies of a, parts of it along a dim, or numbers whose mean, sum or norm it is

A line whose results are none of these differs. It is looked for only where an outcome differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samestep.instrument.collectives import TRACED_CALLS
from samestep.verification.findings import Finding
from samestep.verification.judging.causes import located
from samestep.verification.judging.explanations import ADDED_UP, MEAN_OF_MEANS
from samestep.verification.judging.record import Record, Run
from samestep.verification.numerics import are_padded, in_turns
from samestep.verification.recording.lines import EVALUATION, FORWARD, GRADIENTS, SETUP, STEP

_NEAR = 1e-3  # of a tensor's norm
_LOOKED_AT = {
    "gradients": (FORWARD, GRADIENTS),
    "updates": (STEP,),
    "evaluation": (EVALUATION,),
    "data": (FORWARD,),
    "initial_state": (FORWARD,),
}

_IN_PLACE = re.compile(r"__i\w+__|[a-z]\w*[a-z0-9]_").fullmatch
_RESETS = {"zero_", "fill_", "copy_"}

Place = tuple[str, str, str, int]  # segment, line, function, how many there before
Trace = dict[Place, dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """What one line has brought, on the ranks and in one process.

    Attributes:
        place: of it.
        relation: "copies", "mean", "parts", "padded", "sum", "norm" or "unknown"; None where it is none of these.
        is_loss: whether it is one number of which gradients are taken.
        has_gradient: whether gradients are taken through it.
        is_sum: whether ranks have added up what one process has, to divide it afterwards.
        summed: the line of a sum over the ranks that was written into the tensor to which this line adds.
        is_counted: whether it can be named. A line of integers can if it computes them from integers that agree, such
            as labels from tokens.
        is_mask: whether it is of booleans, which choose a rank's part of what there is.
        is_left_over: whether it changes a tensor from before the segment, a running total say, that no line uses later.
    """

    place: Place
    relation: str | None
    is_loss: bool = False
    has_gradient: bool = False
    is_sum: bool = False
    summed: str | None = None
    is_counted: bool = True
    is_mask: bool = False
    is_left_over: bool = False

    @property
    def where(self) -> str:
        return self.place[1]


@dataclass
class Lines:
    """Compares what lines have computed on the ranks and in the script alone, in runs that kept it."""

    ranks: Record
    alone: Run

    def located(self, finding: Finding, *, of_samples: bool = False) -> Finding:
        """Returns a finding with the line that is to blame, where one is found.

        With `of_samples` that line may make the samples, or choose them.
        """
        lines = self._of(_LOOKED_AT[finding.property])
        if ADDED_UP in finding.cause:
            terms = [line.where for line in lines if line.is_loss and line.relation == "copies"]
            why = "what this line brings every rank has whole, and so it counts once for each"
            return located(finding, terms[-1] if terms else None, why)
        if finding.property == "gradients" and not of_samples:
            line = _of_gradients(lines)
            losses = [line for line in lines if line.is_loss and line.place[0] == FORWARD]
            if line is None and losses and MEAN_OF_MEANS in finding.cause:
                return located(finding, losses[-1].where, "this line computes the loss of a rank")
            if line is None:
                why = "what is brought together at this line carries no gradient to the other ranks"
                return located(finding, self._without_gradient(), why)
        else:
            line = _first_apart(lines, all_lines=of_samples)
        if line is None or (finding.property == "evaluation" and self._is_behind_rows(line, finding.where)):
            return finding
        if line.summed is not None:
            why = f"this line writes a sum over the ranks into what {line.where} adds to: what was there counts again"
            return replace(
                located(finding, line.summed, why), fix="add up a copy: total = t.clone(); dist.all_reduce(total)"
            )
        why = "the first result that is not as in one process is that of this line"
        if (before := self._made_before(line)) is not None:
            return located(finding, before, f"{why}, and {line.where} uses it")
        line = self._integers_of(line, lines) or line
        if (called := self._called_at(line, finding.where)) is not None:
            why += f", which is called at {called}"
        if line.relation == "sum":
            why = "what this line brings is, over the ranks, a sum where their average needs a mean"
        return located(finding, line.where, why)

    def _of(self, segments: Sequence[str]) -> list[Line]:
        """The lines that all processes have come by equally often, in the order of the one."""
        alone = _traces(self.alone.record)[:1]
        return [
            line
            for mine, *theirs in zip(*alone, *_traces(self.ranks), strict=False)
            for line in _lines(mine, theirs, segments)
        ]

    def _made_before(self, line: Line) -> str | None:
        """The line before the first step that first differs, among those from which a line of the step computes."""
        if line.place[0] != FORWARD:
            return None
        ranks, alone = _traces(self.ranks), _traces(self.alone.record)[:1]
        for mine, *theirs in zip(*alone, *ranks, strict=False):
            apart = {one.place for one in _lines(mine, theirs, (SETUP,)) if one.relation is None}
            places = [place for place in theirs[0] if place[0] == SETUP]
            wanted, found = set[int](theirs[0].get(line.place, {}).get("of", ())), ""
            for place in reversed(places if apart else []):
                entry = theirs[0][place]
                if entry["at"] in wanted:
                    wanted.discard(entry["at"])
                    if place in apart:
                        found = place[1]
                        wanted |= {*entry.get("of", ())}
            if found:
                return found
        return None

    def _called_at(self, line: Line, backward: str | None) -> str | None:
        """The line that calls the function of a line, if it is in the function of the backward pass."""
        program, _, number = (backward or "").rpartition(":")
        for trace in _traces(self.ranks)[0]:
            called = trace.get(line.place, {}).get("called")
            if called is not None:
                where, first, last = called
                return where if where.rpartition(":")[0] == program and first <= int(number) <= last else None
        return None

    def _integers_of(self, line: Line, lines: Sequence[Line]) -> Line | None:
        """The first line that makes integers, such as positions, which differ and of which a line computes."""
        if line.place[0] != FORWARD or line.relation is not None:
            return None
        apart = {one.place: one for one in lines if one.relation is None and not (one.is_counted or one.is_mask)}
        for trace in _traces(self.ranks)[0]:
            places = list(trace)
            if line.place not in trace or not apart:
                continue
            wanted, found = set[int](trace[line.place].get("of", ())), None
            for place in reversed(places[: places.index(line.place)]):
                if trace[place]["at"] in wanted:
                    found = apart.get(place, found)
                    wanted |= {*trace[place].get("of", ())}
            return found
        return None

    def _is_behind_rows(self, line: Line, where: str | None) -> bool:
        """Whether a line uses what the ranks have brought together at another: rows, in an order that may be wrong."""
        rank = self.ranks.ranks[0]
        if where not in {event["where"] for event in rank.of("collected") if "rows" in event}:
            return False
        for trace in _traces(self.ranks)[0]:
            places = list(trace)
            if line.place in trace and where in {place[1] for place in places[: places.index(line.place)]}:
                return True
        return False

    def _without_gradient(self) -> str | None:
        """The line of a collective before the backward pass that is given a tensor of which gradients are taken.

        It may be given a detached one, whose numbers lie in the same place.
        """
        calls = [event for event in self.ranks.ranks[0].of("collective") if event.get("traced")]
        taken = {
            one["at"]
            for trace in _traces(self.ranks)[0]
            for place, one in trace.items()
            if place[0] == FORWARD and one["grad"]
        }
        found = (event["where"] for event in calls if event.get("grad") or taken & set(event["at"]))
        return next(found, None)


def _traces(record: Record) -> list[list[Trace]]:
    """What each rank's lines have brought in the step, or in one evaluation after the other."""
    return [
        [
            {one["place"]: one for one in record.value(rank.number, event["kept"])}
            for event in rank.of("lines")
            if event["kept"] is not None
        ]
        for rank in record.ranks
    ]


def _lines(alone: Trace, ranks: Sequence[Trace], segments: Sequence[str]) -> Iterator[Line]:
    grouped = [_by_line(one) for one in (alone, *ranks)]
    of_all: dict[tuple[str, str, str], str | None] = {}
    sums: dict[tuple[str, str, str], str | None] = {}
    agrees: set[int | None] = set()  # storages of rank 0 whose numbers belong to one process's
    for place, one in alone.items():
        line = place[:3]
        together = [each.get(line, []) for each in grouped]
        if place[0] in segments and all(len(each) == len(together[0]) for each in together):
            others, grad = [theirs[place] for theirs in ranks], one["grad"]
            is_sum = place[2] == "all_reduce" and _is_multiple(one, others)
            is_loss, relation = grad and one["shape"] == [], _relation(one, others)
            if relation is None and len(together[0]) > 1:
                if line not in of_all:
                    of_all[line] = _relation_of_all(together[0], together[1:])
                relation = of_all[line]
            if relation is None and line not in sums:
                sums[line] = _summed_before(ranks[0], place)
            summed = sums[line] if relation is None else None
            is_made = not agrees.isdisjoint(others[0].get("of", ())) or one["value"] is None
            is_counted = is_made or one["value"].is_floating_point()
            is_mask = one["value"] is not None and one["value"].dtype == torch.bool
            agrees.discard(others[0].get("at"))
            agrees |= {others[0].get("at")} if relation in {"parts", "copies"} else set()
            about = {"has_gradient": grad, "is_sum": is_sum, "is_counted": is_counted, "is_mask": is_mask}
            is_left_over = place[2] == "all_reduce" and _is_left_over(ranks[0], place)
            yield Line(place, relation, is_loss=is_loss, summed=summed, is_left_over=is_left_over, **about)


def _is_left_over(trace: Trace, place: Place) -> bool:
    """Whether a line changes a tensor that was there before its segment, and no later line of the segment uses it."""
    entries, at = [one for one in trace if one[0] == place[0]], trace[place].get("at")
    number = entries.index(place)
    is_made = any(trace[one].get("at") == at and trace[one].get("new") for one in entries[:number])
    is_used = any(at in trace[one].get("of", ()) for one in entries[number + 1 :])
    return at is not None and not is_made and not is_used


def _summed_before(trace: Trace, place: Place) -> str | None:
    """The line of the last sum over the ranks in the tensor that a line changes, if nothing else was written there."""
    entries, at = list(trace), trace[place].get("at")
    if at is None or not _IN_PLACE(place[2]):
        return None
    for earlier in reversed(entries[: entries.index(place)]):
        if trace[earlier].get("at") == at:
            if earlier[2] == "all_reduce":
                return earlier[1]
            if trace[earlier]["new"] or earlier[2] in _RESETS:
                return None
    return None


def _first_apart(lines: list[Line], *, all_lines: bool = False) -> Line | None:
    """The first that differs, behind one that does not: else ranks do it with other data from the start."""
    counted = [
        line
        for line in lines
        if line.place[0] != FORWARD
        or line.has_gradient
        or (all_lines and not line.is_mask and line.place[2] not in TRACED_CALLS)
    ]
    if any(line.relation == "padded" for line in counted):
        return None  # what is made of it has other shapes, and belongs to one process's all the same
    first = next((place for place, line in enumerate(counted) if line.relation is None), None)
    agree = [line for line in counted[: first or 0] if line.relation not in {None, "unknown"}]
    return counted[first] if first is not None and agree else None


def _of_gradients(lines: list[Line]) -> Line | None:
    """The line that makes gradients differ, or an earlier one that makes of the samples what it needs."""
    found = [line for line in (_brought_apart(lines), _of_loss(lines) or _first_apart(lines)) if line is not None]
    if not found:
        return None
    line = min(found, key=lines.index)
    before = [one for one in lines[: lines.index(line)] if one.is_counted or one.relation is not None]
    return _first_apart(before, all_lines=True) or line


def _brought_apart(lines: list[Line]) -> Line | None:
    """The first sum over the ranks, on the way to the loss, that is neither one process's value nor its multiple."""
    sums = [line for line in lines if line.place[0] == FORWARD and line.place[2] == "all_reduce"]
    return next((line for line in sums if line.relation is None and not line.is_sum and not line.is_left_over), None)


def _is_multiple(one: dict[str, Any], ranks: list[dict[str, Any]]) -> bool:
    values = [each["value"] for each in ranks]
    if one["value"] is None or any(value is None or value.shape != one["value"].shape for value in values):
        return False
    return all(_is_near(value.double(), len(ranks) * one["value"].double()) for value in values)


def _of_loss(lines: list[Line]) -> Line | None:
    """The loss, or the part of it, that is a sum over the ranks; the first line that differs, where one does before."""
    forward = [line for line in lines if line.place[0] == FORWARD and line.has_gradient]
    losses = [line for line in forward if line.is_loss]
    if not losses or losses[-1].relation in {"copies", "mean", "unknown"}:
        return None
    if (before := _first_apart([line for line in forward if not line.is_loss])) is not None:
        return before
    if losses[-1].relation == "sum":
        return losses[-1]
    return next((line for line in reversed(losses) if line.relation == "sum"), losses[-1])


def _relation(one: dict[str, Any], ranks: list[dict[str, Any]]) -> str | None:
    """Returns how the ranks' results give one process's; None where they do not, "unknown" where that is open."""
    values = [each["value"] for each in ranks]
    if one["value"] is None or any(value is None for value in values):
        return "unknown" if _may_belong([each["shape"] for each in ranks], one["shape"]) else None
    whole, parts = one["value"].double(), [value.double() for value in values]
    if not all(bool(each.isfinite().all()) for each in (whole, *parts)):
        return "unknown"
    if all(part.shape == whole.shape for part in parts):
        stacked = torch.stack(parts)
        if all(_is_near(part, whole) for part in parts):
            return "copies"
        totals = {"mean": stacked.mean(0), "sum": stacked.sum(0), "norm": stacked.square().sum(0).sqrt()}
        if (name := next((name for name, total in totals.items() if _is_near(total, whole)), None)) is not None:
            return name
    if any(_are_parts(parts, whole, dim) for dim in range(whole.dim())) or _are_parts_in_any_order(parts, whole):
        return "parts"
    if _are_filled_up(values, one["value"]):
        return "padded"
    return "unknown" if any(each["cut"] for each in (one, *ranks)) else None


def _by_line(trace: Trace) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """What each function has brought at each line of a segment."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for place, one in trace.items():
        found.setdefault(place[:3], []).append(one)
    return found


def _relation_of_all(alone: list[dict[str, Any]], ranks: list[list[dict[str, Any]]]) -> str | None:
    """Returns how all that a line brings in a step gives one process's: micro-batches of ranks have other rows."""
    every = [one for own in (alone, *ranks) for one in own]
    if any(one["value"] is None or one["cut"] for one in every):
        return "unknown"
    whole = [one["value"].double() for one in alone]
    parts = [one["value"].double() for own in ranks for one in own]
    if len({value.shape for value in (*whole, *parts)}) == 1:
        total, brought = torch.stack(whole).sum(0), torch.stack(parts).sum(0)
        if _is_near(brought / len(ranks), total):
            return "mean"
        if _is_near(brought, total):
            return "sum"
    if _are_parts_in_any_order(parts, torch.cat([value.flatten() for value in whole])):
        return "parts"
    theirs = [one["value"] for own in ranks for one in own]
    return "padded" if _are_filled_up(theirs, torch.cat([one["value"].flatten() for one in alone])) else None


def _may_belong(shapes: list[list[int]], whole: list[int]) -> bool:
    """Whether tensors of these shapes may be copies, or parts, of one with the shape `whole`."""
    if all(shape == whole for shape in shapes):
        return True
    return any(
        all(shape[:dim] + shape[dim + 1 :] == whole[:dim] + whole[dim + 1 :] for shape in shapes)
        and sum(shape[dim] for shape in shapes) == whole[dim]
        for dim in range(len(whole))
        if all(len(shape) == len(whole) for shape in shapes)
    )


def _are_parts(parts: list[Tensor], whole: Tensor, dim: int) -> bool:
    """Whether one process has the ranks' parts along a dim, one behind another or in turns."""
    if not _may_belong([list(part.shape) for part in parts], list(whole.shape)):
        return False
    if sum(part.shape[dim] for part in parts) != whole.shape[dim]:
        return False
    return _is_near(torch.cat(parts, dim), whole) or _is_near(in_turns(parts, dim), whole)


def _are_parts_in_any_order(parts: list[Tensor], whole: Tensor) -> bool:
    """Whether the ranks together have one process's numbers: it may be cut along a dim that is no dim any more."""
    if sum(part.numel() for part in parts) != whole.numel():
        return False
    mine = torch.cat([part.flatten() for part in parts])
    return _is_near(mine.sort().values, whole.flatten().sort().values)


def _are_filled_up(parts: list[Tensor], whole: Tensor) -> bool:
    """Whether these are integers, words of texts say, that ranks and one process fill up to other lengths.

    Tensors of the shape that one process has are no part of its texts.
    """
    is_integer = not (whole.is_floating_point() or whole.is_complex() or whole.dtype == torch.bool)
    return (
        is_integer
        and any(part.shape != whole.shape for part in parts)
        and are_padded(torch.cat([part.flatten() for part in parts]), whole.flatten())
    )


def _is_near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= _NEAR * float(other.norm()) + 1e-12
