"""Why gradients, parameters and rates of ranks differ, and at which line."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

from samestep.text import listed, numbers, plural
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record, reductions

UNREACHED = "the reducer did not reach them"
SHOWS_AT = "shows at"  # in a cause: where the line of a finding has been found already
OUTSIDE = "something changes them outside the optimizer, on some ranks only"
NO_GROUP = "the ranks have joined no process group, so each trains a model of its own"
_NONE_REDUCED = "every micro-batch of the step ran under no_sync(), so none was reduced"
_LAST_OUTSIDE = "leave the last micro-batch of a step outside no_sync(), its forward too"
MOVED_APART = ": this line steps the schedule, and only one of them comes by it"
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
    both = (record.ranks[0], record.ranks[rank])
    clips = {one.number: where for one in both if (where := _where(one, step, "clipping")) is not None}
    if len(clips) != 1:
        return None
    [(number, where)] = clips.items()
    return f"rank {number} clips them and the other does not", "clip on every rank", where


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
    forwards = rank.in_window(step["window"], "forward")
    if not wraps:
        return _by_hand(rank, step, bad)
    wrapped = {name for wrap in wraps for name in wrap["names"]}
    trained = {name for wrap in wraps for name in wrap["trained"]}
    plain = [name.partition(": ")[2] or name for name in bad]
    if all(name in wrapped and name not in trained for name in plain):
        cause = "they were frozen when the model was wrapped, and DistributedDataParallel reduces what it found then"
        return cause, "unfreeze before wrapping, or wrap again after unfreezing", wraps[0]["where"]
    if not any(name in wrapped for name in plain):
        return "they belong to no DistributedDataParallel model", "wrap every model that trains", step["where"]
    bare = [event for event in forwards if event["bare"]]
    if bare and len(bare) == len(forwards):
        cause = "the model inside the wrapper was called, which leaves its reducer out"
        return cause, "call the DistributedDataParallel model itself: model(x), not model.module(x)", bare[0]["where"]
    if forwards and not forwards[-1]["synchronises"]:
        if not any(event["synchronises"] for event in forwards):
            return _NONE_REDUCED, _LAST_OUTSIDE, _where(rank, step, "no_sync") or forwards[-1]["where"]
        cause = "the last micro-batch of the step ran under no_sync(), so what it added was not reduced"
        return cause, _LAST_OUTSIDE, _where(rank, step, "backward")
    if step["micro"] and not forwards:
        cause = "no forward went through the wrapper"
        return cause, "call the DistributedDataParallel model itself", _where(rank, step, "backward")
    return UNREACHED, "see `samestep verify --explain gradients-not-synchronised`", None


def _by_hand(rank: Rank, step: Event, bad: list[str]) -> tuple[str, str, str | None]:
    calls = [event for event in reductions(rank, step["window"]) if not event["between_two"]]
    average = "for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()"
    if not calls and (where := _where(rank, step, "no_sync")) is not None:
        return _NONE_REDUCED, _LAST_OUTSIDE, where
    if (cut := _cut_among_some(rank)) is not None and all(one["group"] != "world" for one in calls):
        cause = (
            f"fully_shard is given a mesh of {plural(len(cut['ranks']), 'rank')}, and nothing averages over the others"
        )
        return cause, "give fully_shard the whole mesh, its replicating dim too", cut["where"]
    if not calls:
        return "nothing averages them before the step", average, step["where"]
    if len(bad) < len(step["gradients"]):
        return "what averages the others leaves these out", average, calls[0]["where"]
    members = calls[0]["group"].rpartition(":")[2].split(",")
    if calls[0]["group"] != "world" and len(members) < rank.size:
        cause = f"{calls[0]['op']} runs in a group of {plural(len(members), 'rank')}, and never between groups"
        return cause, "average over all ranks: leave group= out", calls[0]["where"]
    return "what the script communicates before the step does not make them equal", average, calls[0]["where"]


def _cut_among_some(rank: Rank) -> Event | None:
    """The last wrap of parameters, if fully_shard cuts them over some of the ranks."""
    wraps = [event for event in rank.of("wrap") if event["wrapper"] == "fully_shard"]
    return wraps[-1] if wraps and 0 < len(wraps[-1].get("ranks") or ()) < rank.size else None


def of_parameters(record: Record, index: int, rank: int, bad: list[str]) -> Finding:
    """Returns the finding for parameters that differ before the step `index`, though gradients agreed until then."""
    first, other = record.ranks[0], record.ranks[rank]
    loads = [event for one in (other, first) for event in one.of("weights") if event["event"] == index]
    cause = OUTSIDE
    where: str | None = None
    if loads:
        cause, where = "they were loaded, and the ranks have loaded different ones", loads[0]["where"]
    if index:
        mine, theirs = first.steps[index - 1], other.steps[index - 1]
        if rates_differ(mine, theirs):
            return rates(record, index - 1, rank)
        where = where or mine["where"]
        if mine["settings"] != theirs["settings"]:
            cause = f"rank {other.number} steps with {_unlike(theirs, mine)}, rank 0 with {_unlike(mine, theirs)}"
            where = mine["where"]
        elif mine["after"] is not None and mine["after"] != theirs["after"]:
            cause = "gradients and rates agree, so the optimizers' own state or options differ"
            where = mine["where"]
    step = max(index - 1, 0)
    return diverged(first.number, other.number, step, bad, f"after step {step}", cause, where)


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


def located(finding: Finding, where: str | None, why: str) -> Finding:
    """Returns a finding with the line that was found for it, and why it is that one."""
    if not where or where == finding.where:
        return finding
    if SHOWS_AT in finding.cause:  # another line has been named
        return replace(finding, where=where, cause=f"{finding.cause.replace('this line', str(finding.where))}; {why}")
    shows = f" ({SHOWS_AT} {finding.where})" if finding.where else ""
    return replace(finding, where=where, cause=f"{finding.cause}; {why}{shows}")


def rates_differ(first: Event, other: Event) -> bool:
    """Whether both steps are of optimizers, and their learning rates differ: a rank may lack an optimizer."""
    return bool(first["rates"] and other["rates"]) and first["rates"] != other["rates"]


def rates(record: Record, index: int, rank: int) -> Finding:
    """Returns the finding for learning rates that differ at the step `index`."""
    first, other = record.ranks[0], record.ranks[rank]
    mine, theirs = first.steps[index], other.steps[index]
    index = theirs["event"]
    where, why = _where_rates_are_made(other, theirs), ""
    if (moved := _moved_apart(first, other, index)) is not None:
        where, why = moved, MOVED_APART
    elif index and (to_one := [event for event in other.of("collective") if event["op"] == "reduce"]):
        where = to_one[-1]["where"]
        why = "; reduce() brings its result to one rank only, and here every rank goes by what it has"
    return Finding(
        code="learning-rate-differs",
        rank=other.number,
        step=index,
        factor=_ratio(mine["rates"], theirs["rates"]),
        where=where,
        cause=f"at step {index} rank {other.number} steps with the rate {numbers(theirs['rates'])}, rank 0 with "
        f"{numbers(mine['rates'])}{why}",
        fix="let every rank compute the rate from values that all ranks share: reduce the metric that a schedule sees",
    )


def _scheduled(rank: Rank, index: int) -> list[Event]:
    """The steps of schedules until a step."""
    return [event for event in rank.of("scheduler") if event["event"] <= index]


def _where_rates_are_made(rank: Rank, step: Event) -> str | None:
    schedules = _scheduled(rank, step["event"]) if step["event"] else []
    made = [event for event in rank.of("optimizer") if event["number"] == step["optimizer"]]
    return next((event["where"] for event in [*schedules[-1:], *made]), None)


def _moved_apart(first: Rank, other: Rank, index: int) -> str | None:
    """The line at which one of two ranks has stepped a schedule until a step, and the other never does."""
    fewer, more = sorted((first, other), key=lambda rank: len(_scheduled(rank, index)))
    lines = {event["where"] for event in fewer.of("scheduler")}
    extra = _scheduled(more, index)[len(_scheduled(fewer, index)) :]
    return next((event["where"] for event in extra if event["where"] not in lines), None)


def _ratio(first: list[float], theirs: list[float]) -> float | None:
    return theirs[0] / first[0] if first and theirs and first[0] else None


def _where(rank: Rank, step: Event, kind: str) -> str | None:
    """The line of the last event of a kind in a step."""
    return next((event["where"] for event in reversed(rank.in_window(step["window"], kind))), None)


def _unlike(step: Event, other: Event) -> str:
    """The settings of a step's parameter groups that are not those of another one's."""
    nothing: dict[str, Any] = {}
    pairs = zip_longest(step["settings"], other["settings"], fillvalue=nothing)
    unlike = [f"{name}={value}" for mine, theirs in pairs for name, value in mine.items() if theirs.get(name) != value]
    return ", ".join(dict.fromkeys(unlike)) or "other groups"
