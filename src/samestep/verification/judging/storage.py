"""Whether a training that was saved and loaded goes on as it was: parameters, optimizer state, learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import PurePath

from samestep.text import listed
from samestep.verification.findings import AGREES, DECLARED, NOT_REACHED, NOTHING_SAVED, PROVED, Finding, unchecked
from samestep.verification.journal import Event, place_of
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.resumed import same
from samestep.verification.judging.states import differing
from samestep.verification.report import Report

OWN_STATE = "the state of the script's own code is seen in its first step behind the load, which was not compared"
NOT_LOADED = "nothing that was saved was loaded again"
OWN_NUMBER = ": what decides it is a rank's own number, such as a metric of its own samples"


def judge(record: Record, report: Report, *, compares_rates: bool = True) -> None:
    """Adds what is known of saves and loads; rates are compared with those of the save, unless others are known."""
    saves = [(rank, event) for rank in record.ranks for event in rank.of("save") if _is_checkpoint(event)]
    resumed = [(rank, event) for rank in record.ranks for event in rank.of("resumed")]
    compared, unknown = False, []
    report.add(_without_buffers(record))
    report.add(_nothing_loaded(record))
    report.add(_parts_saved_as_whole(record))
    report.add(_files_of_others(record))
    for rank, event in resumed:
        before = _save_of(rank, event, saves)
        if before is None:
            continue
        is_handed_over = not any(load["event"] == event["event"] for load in before[0].of("load"))
        state = _state_of(rank, *before, is_handed_over=is_handed_over)
        if state is None:
            unknown.append(rank.number)
        elif state["parameters"]:  # else saved before there was an optimizer
            compared = True
            found = [*_of_other_parts(rank, event, *before)]
            report.add(found or _compared(rank, event, state, compares_rates=compares_rates))
    if not any(one.code == "checkpoint-inexact" for one in report.errors):
        report.add(_states_of_others(record))
    if unknown:
        why = f"which parts rank {unknown[0]} held when rank 0 saved the whole is not known"
        report.cover("checkpoint", unchecked(why))
    elif compared and record.is_by_hand:
        report.cover("checkpoint", unchecked(OWN_STATE))
    elif compared:
        report.cover("checkpoint", PROVED)
    elif saves:
        report.cover("checkpoint", unchecked(NOT_LOADED))
    else:
        report.cover("checkpoint", NOT_REACHED if record.is_cut_short else NOTHING_SAVED)


def _without_buffers(record: Record) -> Iterator[Finding]:
    """Whether a file holds all parameters of a model and none of its buffers that training changes.

    They may lie in another file that is saved before the next step.
    """
    for rank in record.ranks:
        begun = {name: one for start in rank.of("start")[:1] for name, one in start["buffers"].items()}
        loaded = {load["path"] for load in rank.of("load")}
        for save in rank.of("save"):
            held, state = set(save["digests"].values()), save.get("state")
            if not state or not set(state["parameters"].values()) <= held:
                continue
            changed = {name: one for name, one in _buffers_beside(save).items() if begun.get(name) != one}
            is_snapshot = save["path"] not in loaded and any(map(_has_buffers, rank.of("save")))  # for something else
            if is_snapshot:
                continue
            beside = [one for one in rank.of("save") if one["event"] == save["event"]]
            if changed and not set(changed.values()) & {one for each in beside for one in each["digests"].values()}:
                yield Finding(
                    code="checkpoint-inexact",
                    rank=rank.number,
                    where=save["where"],
                    cause=f"all parameters are saved, and no buffer ({listed(list(changed), 'buffer')})"
                    ": whoever loads this normalises with other statistics",
                    fix="torch.save(model.state_dict(), …), which has both",
                )
                return


def _buffers_beside(save: Event) -> dict[str, str]:
    """The buffers of what is saved: the whole model, or the part that has all its parameters, such as an encoder."""
    state = save["state"]
    names = [_own_name(name) for name in state["parameters"]]
    of_modules = zip(*(name.split(".")[:-1] for name in names), strict=False)
    inner = "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, of_modules))
    is_whole = not inner or any(key.endswith(tuple(names)) for key in save["digests"])
    return {name: one for name, one in state["buffers"].items() if is_whole or _own_name(name).startswith(inner)}


def _has_buffers(save: Event) -> bool:
    """Whether a file holds all parameters and all buffers of the models that are trained."""
    state = save.get("state") or {}
    wanted = {*state.get("parameters", {}).values(), *state.get("buffers", {}).values()}
    return bool(state.get("buffers")) and wanted <= set(save["digests"].values())


def _parts_saved_as_whole(record: Record) -> Iterator[Finding]:
    """Whether torch.distributed.checkpoint is given parts as plain tensors: of one name it writes one rank's."""
    starts = [start for start in record.first_of("start") if start is not None]
    places = [place_of(digest) for start in starts for digest in start["parameters"].values()]
    for saves in zip(*(rank.of("save_together") for rank in record.ranks), strict=False):
        first = saves[0]["plain"]
        apart = [name for name, one in first.items() if any(other["plain"].get(name, one) != one for other in saves)]
        parts = [name for name in apart if any(place.endswith(f"+{first[name][1]}") for place in places)]
        if parts:
            yield Finding(
                code="checkpoint-inexact",
                tensor=parts[0],
                where=saves[0]["where"],
                cause=f"each rank saves its own part as a plain tensor ({listed(parts)}), and "
                "torch.distributed.checkpoint takes plain tensors of one name for alike: it writes those of one rank",
                fix="save the DTensor in place of what to_local() returns, or give each rank's part a name of its own",
            )
            return


def _files_of_others(record: Record) -> Iterator[Finding]:
    """Whether a rank loads the file that another has saved of its part, and never the one that it has saved itself."""
    saved: list[dict[tuple[str, str], Event]] = [
        {(one["where"], one["path"]): one for one in rank.of("save") if one["path"]} for rank in record.ranks
    ]
    savers: dict[tuple[str, str], set[int]] = {}
    for number, theirs in enumerate(saved):
        for name in theirs:
            savers.setdefault(name, set()).add(number)
    for number, rank in enumerate(record.ranks):
        loads: dict[str, Event] = {load["path"]: load for load in rank.of("load")}
        own = {where: path for where, path in saved[number] if savers[where, path] == {number}}
        for (where, path), by in savers.items():
            if path not in loads or len(by) > 1 or number in by or own.get(where) in {None, *loads}:
                continue
            (saver,) = by
            if not any(load["path"] == path for load in record.ranks[saver].of("load")):
                continue  # it is handed over: a member of a population goes on from another's weights, say
            here, there = saved[number][where, own[where]], saved[saver][where, path]
            if here["digests"].keys() == there["digests"].keys() and here["digests"] != there["digests"]:
                yield Finding(
                    code="checkpoint-inexact",
                    rank=rank.number,
                    where=loads[path]["where"],
                    cause=f"rank {rank.number} loads {PurePath(path).name}, which rank {record.ranks[saver].number} "
                    f"has saved of its own part, and never its own, {PurePath(own[where]).name}",
                    fix="name the file that is loaded by the number of the rank, as that which is saved",
                )
                return


def _states_of_others(record: Record) -> Iterator[Finding]:
    """Whether optimizers that hold other parameters on each rank go on, behind a load, with one state on all ranks."""
    first, *others = record.ranks or [Rank(0, [])]
    for mine in first.of("resumed"):
        for rank in others:
            same_step = (event for event in rank.of("resumed") if event["event"] == mine["event"])
            theirs, steps = next(same_step, None), [_step_of(one, mine) for one in (first, rank)]
            if theirs is None or None in steps:
                continue
            held = [step["parameters"] for step in steps if step is not None]
            are_apart = held[0].keys() == held[1].keys() and set(held[0].values()).isdisjoint(held[1].values())
            states = [[one["state"] for one in event["optimizers"]] for event in (mine, theirs)]
            if are_apart and states[0] == states[1] and any(states[0]):
                yield Finding(
                    code="checkpoint-inexact",
                    rank=rank.number,
                    step=mine["event"],
                    where=_where_loaded(rank, theirs),
                    cause=f"rank {rank.number} goes on with the optimizer's state of rank {first.number}, and holds "
                    "other parameters: the state of its own part is not saved, or not loaded",
                    fix="save the state of each rank's optimizer in a file of its own, and load that of the rank",
                )
                return


def _where_loaded(rank: Rank, event: Event) -> str | None:
    return next((load["where"] for load in rank.of("load") if load["path"] == event["path"]), None)


def _state_of(rank: Rank, saver: Rank, save: Event, *, is_handed_over: bool = False) -> Event | None:
    """What a rank had when another, or it itself, saved; None where that is not known. Or what it is to go on with.

    Where each rank holds parts, the others' are those of their last steps, if the saver's are, too: no optimizer state.
    """
    state: Event = save["state"]
    if not state["parameters"] and (made := _stepped(saver, save["event"])):  # their optimizer was gone by then
        held = set(save["digests"].values())
        if not set(map(_value, made.values())) <= held:
            return state
        state = {**state, "parameters": made}
    own, savers = _stepped(rank, save["event"]), _stepped(saver, save["event"])
    are_parts = any(map(place_of, state["parameters"].values())) or bool(differing(own, savers))
    if rank.number == saver.number or not are_parts or is_handed_over:
        return state
    if not savers or not _holds(state["parameters"], savers):
        return None
    return {**state, "parameters": own, "optimizers": [{**one, "state": None} for one in state["optimizers"]]}


def _stepped(rank: Rank, event: int) -> dict[str, str]:
    """The digests of the parameters after the steps before an event."""
    steps = [step for step in rank.steps if step["event"] < event]
    return {name: digest for step in steps for name, digest in (step["after"] or {}).items()}


def _is_checkpoint(save: Event) -> bool:
    """Whether a file has anything of the training: indices to train on, say, are none."""
    state = save.get("state")
    if state is None:
        return True
    values = {*state["parameters"].values(), *state["buffers"].values(), *state.get("averaged", {}).values()}
    names = {_own_name(name) for name in state["parameters"]}
    is_named = any(key.endswith(tuple(names)) for key in save["digests"]) if names else True
    return is_named or not values.isdisjoint(save["digests"].values())


def _save_of(rank: Rank, resumed: Event, saves: Sequence[tuple[Rank, Event]]) -> tuple[Rank, Event] | None:
    """The save of what a rank has loaded before a step: of several files that with whose parameters it goes on."""
    loads = [load for load in rank.of("load") if load["event"] <= resumed["event"]]
    recent = [load for load in reversed(loads) if load["event"] == loads[-1]["event"]]
    each = [[one for one in saves if "state" in one[1] and _is_of(one[1], resumed, load)] for load in recent]
    found, step = [before[-1] for before in each if before], _step_of(rank, resumed)
    now = {} if step is None else step["parameters"]
    going_on = [one for one in found if one[1]["state"]["parameters"] and _holds(one[1]["state"]["parameters"], now)]
    return next(iter((going_on if now else []) or found), None)


def _is_of(save: Event, resumed: Event, load: Event) -> bool:
    """Whether what was loaded before a step is what was saved then, by what is in it."""
    return bool(save["event"] <= resumed["event"] and same(save["digests"], load["digests"]))


def judge_saved(record: Record, whole: Record, report: Report) -> None:
    """Adds whether the ranks save as much of the optimizers' state as one process does."""
    report.add(_partly_saved(record, whole.ranks[0]) if whole.ranks else ())


def judge_with(record: Record, compared: set[int], report: Report) -> None:
    """Judges saves and loads of the state of a script's own code, by the steps whose updates are as in one process."""
    resumed = {event["event"] for rank in record.ranks for event in rank.of("resumed")}
    if report.coverage.get("checkpoint") == unchecked(OWN_STATE) and resumed <= compared:
        margin = "the first step behind the load is that of one process that has loaded its own"
        report.cover("checkpoint", AGREES, margin)


def _partly_saved(record: Record, alone: Rank) -> Iterator[Finding]:
    """Whether only some ranks save their part of a state that is cut over all ranks."""
    theirs, ours = _saves([alone]), _saves(record.ranks)
    for place, own in ours.items():
        whole = theirs.get(place, [])
        beside = [event for other in ours.keys() - theirs.keys() if other[1] == place[1] for event in ours[other]]
        events = [*own, *beside]  # another rank may save its part at a line that one process does not come to
        if sum(event["numbers"] for event in events) >= sum(event["numbers"] for event in whole):
            continue
        held, of_all = (sum(sum(event["own_state"].values()) for event in saves) for saves in (events, whole))
        if 0 < held < of_all:
            yield Finding(
                code="checkpoint-inexact",
                tensor=next(name for event in whole for name in event["own_state"]),
                where=events[0]["where"],
                cause=f"the file holds {held:,} of the {of_all:,} numbers of the optimizer's state that one process "
                "saves: each rank has a part of it, and not all parts are saved",
                fix="gather the parts of all ranks before rank 0 saves, or let every rank save its own",
            )
            return


def judge_moments(record: Record, whole: Record, report: Report) -> None:
    """Adds whether one process with the same weights saves behind other steps: then a rank's own number decides that.

    A metric that was found to be one process's may still be on the other side of a bound by rounding.
    """
    if whole.ranks and not report.errors and report.coverage.get("evaluation") not in {PROVED, AGREES, DECLARED}:
        report.add(_saved_elsewhere(record, whole.ranks[0]))


def _saved_elsewhere(record: Record, alone: Rank) -> Iterator[Finding]:
    windows = [event["window"] for event in alone.events if "window" in event]
    unplaced = [event for event in alone.events if event.get("placed") is False]  # with weights of its own
    # of what belongs to an evaluation, the window in which that has begun
    begun = [int(event["window"] if "window" in event else event["phase"].partition(".")[0]) for event in unplaced]
    placed, reached = min(begun, default=record.steps), max(windows, default=0)
    moments = _moments([alone])
    for where, mine in _moments(record.ranks).items():
        theirs = moments.get(where, mine)
        apart = sorted(
            one for one in mine ^ theirs if 0 < one < placed and one < (reached if one in mine else record.steps)
        )
        if apart:
            if _draws_apart([*record.ranks, alone], apart[0]):
                return
            step = apart[0] - 1
            ranks, process = ("save", "does not") if apart[0] in mine else ("do not save", "does")
            yield Finding(
                code="evaluation-inexact",
                step=step,
                where=where,
                cause=f"after step {step} the ranks {ranks}, and one process with the same weights {process}"
                f"{OWN_NUMBER}",
                fix="reduce the metric over all ranks before it decides what is kept",
            )
            return


def _draws_apart(processes: Sequence[Rank], window: int) -> bool:
    """Whether processes draw other numbers, until a window, for what they bring together: it may decide on a save."""
    drew: list[list[str | None]] = []
    for process in processes:
        brought = [one for one in process.of("collected") if int(str(one["phase"]).partition(".")[0]) <= window]
        drew.append([one["drew"] for one in brought])
    return any(one != other for own in drew for one, other in zip(own, drew[-1], strict=False))


def _moments(ranks: Sequence[Rank]) -> dict[str, set[int]]:
    """Line -> after how many steps it saves something."""
    moments: dict[str, set[int]] = {}
    for where, window in _saves(ranks):
        moments.setdefault(where, set()).add(window)
    return moments


def _saves(ranks: Sequence[Rank]) -> dict[tuple[str, int], list[Event]]:
    """What is saved at each line and step: a library may save every tensor by itself, in an order of its own."""
    saves: dict[tuple[str, int], list[Event]] = {}
    for event in (event for rank in ranks for event in rank.of("save")):
        saves.setdefault((event["where"], event["window"]), []).append(event)
    return saves


def _nothing_loaded(record: Record) -> Iterator[Finding]:
    """Whether a state was given to a model that has none of its names."""
    loads = [(rank.number, event) for rank in record.ranks for event in rank.of("weights")]
    held = {(rank, event["event"], event["held"]) for rank, event in loads if event["missing"] < event["held"]}
    for rank, event in loads:
        is_tried_again = (rank, event["event"], event["held"]) in held  # with other names
        if event["missing"] and event["missing"] == event["held"] and event["unexpected"] and not is_tried_again:
            yield Finding(
                code="checkpoint-inexact",
                rank=rank,
                where=event["where"],
                cause=f"none of the {event['unexpected']} tensors that were given has a name that the model knows, so "
                "nothing was loaded, and strict=False says nothing",
                fix="take `module.` off the names, or load into the wrapped model; leave strict=False out",
            )
            return


def _of_other_parts(rank: Rank, event: Event, saver: Rank, save: Event) -> Iterator[Finding]:
    """Whether a rank goes on with the parts of the parameters that another rank has saved of its own."""
    step = _step_of(rank, event)
    parts = {} if step is None else {name: one for name, one in step["parameters"].items() if place_of(one)}
    theirs = _stepped(saver, save["event"])
    are_theirs = all(
        place_of(theirs.get(name)) not in {"", place_of(one)} and _value(theirs[name]) == _value(one)
        for name, one in parts.items()
    )
    if rank.number != saver.number and parts and are_theirs:
        yield Finding(
            code="checkpoint-inexact",
            rank=rank.number,
            step=event["event"],
            tensor=next(iter(parts)),
            where=save["where"],
            cause=f"the file has the parts of rank {saver.number} alone, and rank {rank.number} goes on with them in "
            "the place of its own",
            fix="save what all ranks have: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
            "on every rank, or torch.distributed.checkpoint",
        )


def _step_of(rank: Rank, event: Event) -> Event | None:
    """The first step after a load."""
    return rank.steps[event["event"]] if event["event"] < len(rank.steps) else None


def _value(digest: str) -> str:
    return digest.rpartition(" ")[2]


def _compared(rank: Rank, event: Event, state: Event, *, compares_rates: bool) -> Iterator[Finding]:
    step = _step_of(rank, event)
    if step is None or event.get("into_others") or event.get("into_trained"):  # a teacher's, or earlier weights
        return
    where = _where_loaded(rank, event)
    now, others = step["parameters"], _of_other_shapes(rank, step, state)
    past = {digest for one in rank.steps for digest in (one["after"] or {}).values()}
    if not _holds(state["parameters"], {name: one for name, one in now.items() if name not in others}):
        if not _goes_on_as_before(rank, step):
            yield _lost(rank, event, where, "the parameters", "load the model's state before the first step")
    elif lost := _lost_buffers(rank, state, event):
        fix = "save model.state_dict(), which has the buffers too"
        yield _lost(rank, event, where, f"{listed(lost, 'buffer')}", fix)
    elif (names := _averaged_anew(state, event, now, past)) is not None:
        what = f"the average of the parameters ({listed(names)}), which begins again with their present values,"
        yield _lost(rank, event, where, what, 'save {"ema": ema.state_dict()} as well, and load it')
    else:
        for new in event["optimizers"]:
            if _goes_on(rank, state["optimizers"], new) and not _is_loaded_again(rank, event):
                yield from _optimizer(rank, event, where, state["optimizers"], new, compares_rates=compares_rates)


def _lost_buffers(rank: Rank, saved: Event, event: Event) -> list[str]:
    """Buffers that begin anew behind a load; the script may have given others the values that they have now."""
    begun = {name: one for start in rank.of("start")[:1] for name, one in start["buffers"].items()}
    now = event["buffers"]
    return [name for name in differing(saved["buffers"], now) if begun.get(name, now.get(name)) == now.get(name)]


def _goes_on_as_before(rank: Rank, step: Event) -> bool:
    """Whether a step begins with what the last one of its optimizer has left: something else was loaded into."""
    before = [one for one in rank.steps if one["event"] < step["event"] and one["optimizer"] == step["optimizer"]]
    after = before[-1]["after"] if before else None
    return after is not None and all(step["parameters"].get(name) == one for name, one in after.items())


def _averaged_anew(saved: Event, event: Event, parameters: dict[str, str], past: set[str]) -> list[str] | None:
    """The names in an averaged model that is made after the load, from the trained one, where that of the save was not.

    A copy of the trained parameters is no average yet, nor is one of those behind an earlier step, as the model of an
    earlier part of the training is; `past` has the digests of these. One that is loaded has other values.
    """
    before = _by_model(saved.get("averaged", {}))
    made = [one for model, one in _by_model(event.get("averaged", {})).items() if model not in before]
    for copy in made:
        averages = [
            one
            for one in before.values()
            if one.keys() == copy.keys() and _are_apart(one, saved["parameters"]) and not past.issuperset(one.values())
        ]
        if averages and copy not in averages and not _are_apart(copy, parameters):
            return list(copy)
    return None


def _are_apart(averaged: dict[str, str], parameters: dict[str, str]) -> bool:
    """Whether an averaged model has other values than the trained one, of which it has the names."""
    known = {_own_name(name): digest for name, digest in parameters.items()}
    return any(known.get(name) != digest for name, digest in averaged.items())


def _by_model(averaged: dict[str, str]) -> dict[str, dict[str, str]]:
    models: dict[str, dict[str, str]] = {}
    for name, digest in averaged.items():
        model, _, own = name.partition(": ")
        models.setdefault(model, {})[own] = digest
    return models


def _is_loaded_again(rank: Rank, event: Event) -> bool:
    """Whether a file is loaded as it is more than once, between steps: what begins with it, a task say, begins anew."""
    loads = [load for load in rank.of("load") if load["path"] == event["path"]]
    held = [load["digests"] for load in loads if load["event"] == event["event"]]
    return len({load["event"] for load in loads if load["digests"] in held}) > 1


def _goes_on(rank: Rank, saved: list[Event], new: Event) -> bool:
    """Whether an optimizer was made to go on after the save: with a rate that one has had there, or has begun with.

    One that was there at the save has gone on already, and one with a rate of its own begins something else, such as
    a fine-tuning of the best weights.
    """
    numbers = {old["number"] for old in saved}
    known = [old["rates"] for old in saved]
    known += [step["rates"] for step in rank.steps if step["optimizer"] in numbers]
    return new["number"] not in numbers and new["rates"] in known


def _optimizer(
    rank: Rank, event: Event, where: str | None, saved: list[Event], new: Event, *, compares_rates: bool
) -> Iterator[Finding]:
    """Whether an optimizer goes on as one of those that were there at the save."""
    # of a sharded optimizer each rank has the state of other parameters
    same = [old for old in saved if (new.get("names") or old.get("names")) == old.get("names")]
    trained = [old for old in same if old["state"]]
    is_moved = any(old.get("placed") != new.get("placed") for old in trained)  # what a rank has of them is no measure
    if trained and not is_moved and not any(old["state"] == new["state"] for old in trained):
        fix = 'save {"optimizer": optimizer.state_dict()} as well, and load it'
        yield _lost(rank, event, where, "the optimizer's state", fix)
    elif compares_rates and saved and not any(old["rates"] == new["rates"] for old in saved):
        fix = 'save {"scheduler": scheduler.state_dict()} as well, and load it'
        yield _lost(rank, event, where, f"the learning rate ({saved[-1]['rates']} is now {new['rates']})", fix)


def _holds(saved: dict[str, str], now: dict[str, str]) -> bool:
    """Whether the parameters of a step are among those that were there at the save, under their names."""
    by_name: dict[str, set[str]] = {}
    for name, digest in saved.items():
        by_name.setdefault(_own_name(name), set()).add(digest)
    return all(digest in by_name.get(_own_name(name), {digest}) for name, digest in now.items())


def _own_name(name: str) -> str:
    """A parameter's name without that of its model, as of "model 2: fc.weight"."""
    return name.rpartition(": ")[2]


def _of_other_shapes(rank: Rank, step: Event, saved: Event) -> set[str]:
    """The parameters of a step of whose name a model had none of their shape at the save: another model's."""
    shapes = {event["optimizer"]: dict(zip(event["names"], event["shapes"], strict=True)) for event in rank.of("names")}
    known: dict[str, list[object]] = {}
    for old in saved["optimizers"]:
        for name, shape in shapes.get(old["number"], {}).items():
            known.setdefault(_own_name(name), []).append(shape)
    own = shapes.get(step["optimizer"], {})
    return {name for name, shape in own.items() if shape not in known.get(_own_name(name), [shape])}


def _lost(rank: Rank, event: Event, where: str | None, what: str, fix: str) -> Finding:
    return Finding(
        code="checkpoint-inexact",
        rank=rank.number,
        step=event["event"],
        where=where,
        cause=f"rank {rank.number} goes on at step {event['event']} after loading a checkpoint, and {what} did not "
        "come back as it was when that was saved",
        fix=fix,
    )
