"""Why ranks drift apart: from where a difference shows to the line that made it."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from samestep.text import listed, numbers, plural
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.record import REDUCING, Rank, Record

__all__: list[str] = []

UNREACHED = "the reducer did not reach them"
OUTSIDE = "something changes them outside the optimizer, on some ranks only"
NO_GROUP = "the ranks have joined no process group, so each trains a model of its own"
JOIN = (
    'torch.distributed.init_process_group("gloo"); '
    "model = torch.nn.parallel.DistributedDataParallel(model)    # before the optimizer is made"
)


def of_gradients(record: Record, index: int, rank: int, bad: list[str]) -> Finding:
    """Returns the finding for gradients that differ at the step `index`, on `rank` in the tensors `bad`."""
    step = record.ranks[0].steps[index]
    why = (NO_GROUP, JOIN, step["where"]) if record.has_no_group else _clipped_by_some(record, step, rank)
    return unequal_gradients(record.ranks[0], record.ranks[rank].number, step, bad, why)


def _clipped_by_some(record: Record, step: Event, rank: int) -> tuple[str, str, str | None] | None:
    """Whether rank 0 or `rank` clips the gradients of a step, and the other does not."""
    clips = {
        one.number: _where(one.by_window.get(step["window"], []), "clipping")
        for one in (record.ranks[0], record.ranks[rank])
    }
    clipping = [number for number, where in clips.items() if where is not None]
    if len(clipping) != 1:
        return None
    return f"rank {clipping[0]} clips them and the other does not", "clip on every rank", clips[clipping[0]]


def unequal_gradients(
    first: Rank, number: int, step: Event, bad: list[str], why: tuple[str, str, str | None] | None = None
) -> Finding:
    """Returns the finding for gradients that at a step of the rank `first` are others on the rank `number`."""
    cause, fix, where = why or _of_gradients(first, step, bad)
    return Finding(
        code="gradients-not-synchronised",
        rank=number,
        step=step["event"],
        tensor=bad[0],
        where=where or step["where"],
        cause=f"at step {step['event']} rank {number} has different gradients than rank {first.number} in "
        f"{listed(bad)}: {cause}",
        fix=fix,
    )


def _of_gradients(rank: Rank, step: Event, bad: list[str]) -> tuple[str, str, str | None]:
    wraps = [event for event in rank.of("wrap") if event["wrapper"] == "DistributedDataParallel"]
    window = rank.by_window.get(step["window"], [])
    forwards = [event for event in window if event["kind"] == "forward"]
    if not wraps:
        return _by_hand(rank, window, step, bad)
    wrapped = {name for wrap in wraps for name in wrap["names"]}
    trained = {name for wrap in wraps for name in wrap["trained"]}
    plain = [name.partition(": ")[2] or name for name in bad]
    if all(name in wrapped and name not in trained for name in plain):
        cause = "they were frozen when the model was wrapped, and DistributedDataParallel reduces what it found then"
        return cause, "unfreeze before wrapping, or wrap again after unfreezing", wraps[0]["where"]
    if not any(name in wrapped for name in plain):
        return "they belong to no DistributedDataParallel model", "wrap every model that trains", step["where"]
    bare = [event for event in forwards if event["bare"]]
    if bare and all(event["bare"] for event in forwards):
        cause = "the model inside the wrapper was called, which leaves its reducer out"
        return cause, "call the DistributedDataParallel model itself: model(x), not model.module(x)", bare[0]["where"]
    if forwards and not forwards[-1]["synchronises"]:
        some = any(event["synchronises"] for event in forwards)
        cause = "the last micro-batch of the step ran under no_sync(), so what it added was not reduced"
        cause = cause if some else "every micro-batch of the step ran under no_sync(), so none was reduced"
        where = _where(window, "backward") if some else _where(window, "no_sync") or forwards[-1]["where"]
        return cause, "leave the last micro-batch of a step outside no_sync(), its forward too", where
    if step["micro"] and not forwards:
        cause = "no forward went through the wrapper"
        return cause, "call the DistributedDataParallel model itself", _where(window, "backward")
    return UNREACHED, "see `samestep verify --explain gradients-not-synchronised`", None


def _by_hand(rank: Rank, window: list[Event], step: Event, bad: list[str]) -> tuple[str, str, str | None]:
    calls = [event for event in window if event["kind"] == "collective" and not event["between_two"]]
    reductions = [event for event in calls if event["op"] in REDUCING]
    average = "for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()"
    if not reductions and (where := _where(window, "no_sync")) is not None:
        cause = "every micro-batch of the step ran under no_sync(), so none was reduced"
        return cause, "leave the last micro-batch of a step outside no_sync(), its forward too", where
    if not reductions:
        return "nothing averages them before the step", average, step["where"]
    if len(bad) < len(step["gradients"]):
        return "what averages the others leaves these out", average, reductions[0]["where"]
    members = reductions[0]["group"].rpartition(":")[2].split(",")
    if reductions[0]["group"] != "world" and len(members) < rank.size:
        cause = f"{reductions[0]['op']} runs in a group of {plural(len(members), 'rank')}, and never between groups"
        return cause, "average over all ranks: leave group= out", reductions[0]["where"]
    return "what the script communicates before the step does not make them equal", average, reductions[0]["where"]


def of_parameters(record: Record, index: int, rank: int, bad: list[str]) -> Finding:
    """Returns the finding for parameters that differ before the step `index`, though gradients agreed until then."""
    before = record.ranks[0].steps[index - 1] if index else None
    theirs = record.ranks[rank].steps[index - 1] if index else None
    number = record.ranks[rank].number
    if before is not None and theirs is not None and rates_differ(before, theirs):
        return rates(record, index - 1, rank)
    where = None if before is None else before["where"]
    loads = [event for one in (rank, 0) for event in record.ranks[one].of("weights") if event["event"] == index]
    if before is not None and theirs is not None and before["settings"] != theirs["settings"]:
        cause = f"rank {number} steps with {_unlike(theirs, before)}, rank 0 with {_unlike(before, theirs)}"
    elif before is not None and differing_after(before, theirs):
        cause = "gradients and rates agree, so the optimizers' own state or options differ"
    elif loads:
        cause, where = "they were loaded, and the ranks have loaded different ones", loads[0]["where"]
    else:
        cause = OUTSIDE
    step = max(index - 1, 0)
    return diverged(record.ranks[0].number, number, step, bad, f"after step {step}", cause, where)


def diverged(first: int, number: int, step: int, bad: list[str], when: str, cause: str, where: str | None) -> Finding:
    """Returns the finding for parameters of the rank `number` that are not those of the rank `first` any more."""
    return Finding(
        code="parameters-diverged",
        rank=number,
        step=step,
        tensor=bad[0],
        where=where,
        cause=f"{when} rank {number} has other values than rank {first} in {listed(bad)}: {cause}",
        fix="do the same to the parameters on every rank, or broadcast them from rank 0 afterwards",
    )


def differing_after(first: Event, other: Event | None) -> bool:
    """Returns whether parameters differed right after a step."""
    return other is not None and first["after"] is not None and first["after"] != other["after"]


def rates_differ(first: Event, other: Event) -> bool:
    """Whether both steps are of optimizers, and their learning rates differ: a rank may lack an optimizer."""
    return bool(first["rates"] and other["rates"]) and first["rates"] != other["rates"]


def rates(record: Record, index: int, rank: int) -> Finding:
    """Returns the finding for learning rates that differ at the step `index`."""
    first, theirs = record.ranks[0].steps[index], record.ranks[rank].steps[index]
    index = theirs["event"]
    optimizers = [event for event in record.ranks[rank].of("optimizer") if event["number"] == theirs["optimizer"]]
    schedules = [event for event in record.ranks[rank].of("scheduler") if event["event"] <= index]
    where = schedules[-1]["where"] if schedules and index else (optimizers[0]["where"] if optimizers else None)
    to_one = [event for event in record.ranks[rank].of("collective") if event["op"] == "reduce"] if index else []
    where, why = (to_one[-1]["where"], _TO_ONE) if to_one else (where, "")
    if (moved := _moved_apart(record.ranks[0], record.ranks[rank], index)) is not None:
        where, why = moved, MOVED_APART
    return Finding(
        code="learning-rate-differs",
        rank=record.ranks[rank].number,
        step=index,
        factor=_ratio(first["rates"], theirs["rates"]),
        where=where,
        cause=f"at step {index} rank {record.ranks[rank].number} steps with the rate {numbers(theirs['rates'])}, rank "
        f"0 with {numbers(first['rates'])}{why}",
        fix="let every rank compute the rate from values that all ranks share: reduce the metric that a schedule sees",
    )


def _moved_apart(first: Rank, other: Rank, index: int) -> str | None:
    """The line at which one of two ranks has stepped a schedule until a step, and the other never does."""
    steps = {
        rank.number: [event for event in rank.of("scheduler") if event["event"] <= index] for rank in (first, other)
    }
    behind, ahead = sorted((first, other), key=lambda rank: len(steps[rank.number]))
    lines = {event["where"] for event in behind.of("scheduler")}
    extra = steps[ahead.number][len(steps[behind.number]) :]
    return next((event["where"] for event in extra if event["where"] not in lines), None)


MOVED_APART = ": this line steps the schedule, and only one of them comes by it"
_TO_ONE = "; reduce() brings its result to one rank only, and here every rank goes by what it has"


def _ratio(first: list[float], theirs: list[float]) -> float | None:
    return theirs[0] / first[0] if first and theirs and first[0] else None


def _where(window: list[Event], kind: str) -> str | None:
    return next((event["where"] for event in reversed(window) if event["kind"] == kind), None)


def _unlike(step: Event, other: Event) -> str:
    """The settings of a step's parameter groups that are not those of another one's."""
    nothing: dict[str, Any] = {}
    pairs = zip_longest(step["settings"], other["settings"], fillvalue=nothing)
    told = [f"{name}={value}" for mine, theirs in pairs for name, value in mine.items() if theirs.get(name) != value]
    return ", ".join(dict.fromkeys(told)) or "other groups"
