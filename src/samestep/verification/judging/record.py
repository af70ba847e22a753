"""What the processes of a run have recorded: `Rank` is one process, `Record` all of them, `Run` the script alone."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from samestep.verification import journal
from samestep.verification.journal import Event, place_of
from samestep.verification.judging.averaged import Averaged

if TYPE_CHECKING:
    from samestep.verification.runs import Ended

BY_THEMSELVES = "each rank first trains models of its own; one process trains all of them, in other steps"
_UNITS = {"float16": 2**-11, "bfloat16": 2**-8}  # roundoff of types in which gradients may be sent
REDUCING = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor"}

PassKey = tuple[str, int]  # a DataLoader, and the number of the pass over it
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Rank:
    """One rank's events, in their order."""

    number: int
    events: list[Event]

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["kind"] in kinds]

    @cached_property
    def size(self) -> int:
        """How many ranks there were."""
        begun = self.of("begin")
        return int(begun[0]["size"]) if begun else 1

    @cached_property
    def steps(self) -> list[Event]:
        """The optimizer steps, each with the digests of the parameters "after" it, or None."""
        after = {event["event"]: event["parameters"] for event in self.of("stepped")}
        return [_stepped(event, after.get(event["event"])) for event in self.of("step")]

    @cached_property
    def by_window(self) -> dict[int, list[Event]]:
        windows: dict[int, list[Event]] = {}
        for event in self.events:
            if "window" in event:
                windows.setdefault(event["window"], []).append(event)
        return windows

    def in_window(self, window: int, *kinds: str) -> list[Event]:
        return [event for event in self.by_window.get(window, []) if event["kind"] in kinds]

    def added_in(self, window: int) -> list[Event]:
        """Returns the backward passes of a window whose gradients are in its step: those before are thrown away."""
        backwards = self.in_window(window, "backward")
        anew = (place for place, event in enumerate(backwards) if not event.get("adds", place))
        return backwards[max(anew, default=0) :]

    def written_before(self, window: int) -> dict[int, set[str]]:
        """Returns names, by optimizer, of the parameters that a window begins with, and no step has made so."""
        found = {}
        for step in self.in_steps(window):
            left = [one["after"] or {} for one in self.in_steps(window - 1) if one["optimizer"] == step["optimizer"]]
            before = left[-1] if left else {}
            names = {name for name, one in step["parameters"].items() if before.get(name, one) != one}
            if names:
                found[step["optimizer"]] = names
        return found

    def in_steps(self, window: int) -> list[Event]:
        """Returns the steps that were taken in a window."""
        return [step for step in self.steps if step["window"] == window]

    def backward_of(self, step: Event, place: int = 0) -> str:
        """Returns the line of a backward pass of a step, by default the first; that of the step if there is none."""
        backwards = self.in_window(step["window"], "backward")
        where: str = (backwards[place] if backwards else step)["where"]
        return where

    def rates_by_name(self, step: Event) -> dict[str, float]:
        """Returns the learning rate of each parameter that the optimizer of a step holds."""
        held = [event for event in self.of("names") if event["optimizer"] == step["optimizer"] and "groups" in event]
        pairs = zip(held[-1]["names"], held[-1]["groups"], strict=True) if held else ()
        return {name: step["rates"][group] for name, group in pairs if group < len(step["rates"])}

    @cached_property
    def ended(self) -> Event | None:
        """How its script ended; None where it was stopped or died."""
        ends = self.of("end")
        return ends[-1] if ends else None

    @property
    def is_complete(self) -> bool:
        """Whether the script came to its own end."""
        return self.ended is not None and not self.ended["enough"] and self.ended["error"] is None


@dataclass(frozen=True)
class Record:
    """The ranks of a run that trained, in order, and the folder of their values.

    `stepped` has the gradients with which the script's own code steps, by event, where .grad held others before.
    """

    folder: Path
    ranks: list[Rank]
    stepped: Mapping[int, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def steps(self) -> int:
        """How many optimizer steps all of them have taken together: until one has used its inputs up, under Join."""
        taken = min((len(rank.steps) for rank in self.ranks), default=0)
        return taken if self.uneven is None else min(taken, self.uneven["event"])

    @property
    def micro_batches(self) -> int:
        """How many backward passes each step of each rank has; 0 where not all have as many."""
        counts = {int(step["micro"]) for rank in self.data.ranks for step in rank.steps}
        return counts.pop() if len(counts) == 1 else 0

    @cached_property
    def has_no_group(self) -> bool:
        """Whether no rank was in a process group at any of its steps."""
        joined = [step.get("in_group", True) for rank in self.ranks for step in rank.steps]
        return bool(joined) and not any(joined)

    @cached_property
    def has_local_norms(self) -> bool:
        """Whether a model has BatchNorm that is not synchronised: its statistics are of a rank's own samples."""
        return any(event.get("local_norms") for event in self.ranks[0].of("wrap", "start"))

    @cached_property
    def is_cut_short(self) -> bool:
        """Whether the recording has ended a rank, or a pass over its data, before the script did."""
        cut = any(event.get("cut") is not None for rank in self.ranks for event in rank.of("passed"))
        return cut or any(rank.ended is not None and rank.ended["enough"] for rank in self.ranks)

    @cached_property
    def asked(self) -> int:
        """How many of the steps were asked for; later ones are taken only to reach what follows a pass."""
        return min([self.steps, *(int(event["event"]) for rank in self.ranks for event in rank.of("enough")[:1])])

    @cached_property
    def uneven(self) -> Event | None:
        """The first end of a Join context that ranks reached after different numbers of steps, by the earliest rank."""
        for ends in zip(*(rank.of("joined") for rank in self.ranks), strict=False):
            first: Event = min(ends, key=lambda end: int(end["event"]))
            if any(end["event"] != first["event"] for end in ends):
                return first
        return None

    def events_of_step(self, index: int) -> list[Event]:
        return [rank.steps[index] for rank in self.ranks]

    def first_of(self, kind: str) -> list[Event | None]:
        """Returns each rank's first event of a kind."""
        return [next(iter(rank.of(kind)), None) for rank in self.ranks]

    def gradients(self, step: Event) -> Any:
        """Returns the gradients of a step whose values were kept, those that were compressed as they were before."""
        compressed = self.compressed(step)
        if not compressed.models:
            return self.used(step)
        return dict(zip(step["gradients"], compressed.brought(), strict=True))

    def compressed(self, step: Event) -> Averaged:
        """Returns what the ranks recorded of a step's compressed gradients."""
        return Averaged(self._of_step("compressed", step), self.value)

    def _of_step(self, kind: str, step: Event) -> list[list[Event]]:
        return [[event for event in rank.of(kind) if event["event"] == step["event"]] for rank in self.ranks]

    def used(self, step: Event) -> Any:
        """Returns the gradients with which the optimizer steps; what is cut is put together from all ranks.

        Where the script's own code averages them while it steps, .grad holds each rank's own before the step.
        """
        if self.averages_within(step):
            from samestep.verification.numerics import mean

            if (known := self.stepped.get(step["event"])) is not None:
                return known
            if parts := self.parts(step):
                return mean(parts)
        return self._whole(self.events_of_step(step["event"]))

    @cached_property
    def is_by_hand(self) -> bool:
        """Whether the script steps by its own code."""
        return any(step.get("by_hand") for rank in self.ranks for step in rank.steps)

    @cached_property
    def is_averaged_within(self) -> bool:
        """Whether the script may average gradients only while it steps."""
        return any(self.averages_within(step) for step in self.ranks[0].steps[: self.steps]) if self.ranks else False

    @cached_property
    def by_themselves(self) -> set[int]:
        """The optimizers that each rank steps by itself before those of all ranks begin: in a search for a rate, say.

        No model is wrapped, and no rank reduces anything before their steps, as it does before those of others.
        """
        found: set[int] = set()
        for rank in [] if self.wrappers else self.ranks:
            reduces = [bool(reductions(rank, step["window"])) for step in rank.steps]
            begun = reduces.index(True) if True in reduces else 0
            own, common = ({step["optimizer"] for step in steps} for steps in (rank.steps[:begun], rank.steps[begun:]))
            found |= own - common
        return found

    def averages_within(self, step: Event) -> bool:
        """Whether a step may average gradients itself: own code steps, or it makes equal parameters of unequal ones."""
        if step.get("by_hand"):
            return True
        events = self.events_of_step(step["event"])
        if self.is_cut or any(event.get("after") is None for event in events):
            return False
        differ = any(event["gradients"] != events[0]["gradients"] for event in events)
        return differ and all(event["after"] == events[0]["after"] for event in events)

    def norms(self, step: Event) -> dict[str, float]:
        """Returns the norms of a step's gradients; of those that are cut over the ranks, of all parts together."""
        squares: dict[str, dict[str, float]] = {}
        for event in self.events_of_step(step["event"]) if self.is_cut else [step]:
            for name, norm in event["norms"].items():
                squares.setdefault(name, {})[place_of(event["gradients"].get(name))] = norm
        return {name: math.hypot(*parts.values()) for name, parts in squares.items()}

    def parts(self, step: Event) -> list[Any]:
        """Returns what each rank had for a gradient before the script's own code averaged it, if that was kept."""
        if not step.get("by_hand"):
            return self.own(step) or []
        kept = self._kept(self.events_of_step(step["event"]))
        return [{name: values[name] for name in step["gradients"] if name in values} for values in kept]

    def own(self, step: Event) -> list[Any] | None:
        """Returns the gradients of each rank's own backward passes; None where some rank has not kept them."""
        events = self.events_of_step(step["event"])
        if any(event.get("own") is None for event in events):
            return None
        return self._kept(events, "own")

    @property
    def kept_steps(self) -> list[Event]:
        """The first rank's steps whose values were kept, on all ranks that keep any."""
        steps = self.ranks[0].steps[: self.steps]
        return [step for step in steps if step["kept"] is not None and self.is_seen_by_all(step)]

    def is_seen_by_all(self, step: Event) -> bool:
        """Whether every rank that keeps gradients, or records its samples, did so at this step.

        Where one rank evaluates by itself, it alone looks at the step after its evaluation.
        """
        keeping = [rank for rank in self.ranks if any(one["kept"] is not None for one in rank.steps)]
        kept = [rank.steps[step["event"]]["kept"] is not None for rank in keeping]
        has_inputs = {bool(rank.in_window(step["window"], "input")) for rank in self.ranks}
        return all(kept) and len(has_inputs) <= 1

    def updated(self, step: Event) -> Event | None:
        """Returns what the first rank recorded of a step's update; None where it was not kept."""
        updates = self._updates(step)
        return updates[0] if updates and updates[0]["kept"] is not None else None

    def carries_apart(self, step: Event) -> bool:
        """Whether replicas have different state of one parameter after a step: what one has not sent yet, say."""
        known: dict[str, Any] = {}
        states = [(name, one) for event in self._updates(step) for name, one in (event.get("carried") or {}).items()]
        return not self.is_cut and any(known.setdefault(name, one) != one for name, one in states)

    def sent_in(self, step: Event) -> float:
        """Returns the unit roundoff of the coarsest type in which ranks reduce anything in a step; 0 of full ones."""
        calls = reductions(self.ranks[0], step["window"])
        return max((_UNITS.get(dtype, 0.0) for one in calls for dtype in one["dtypes"]), default=0.0)

    def update(self, step: Event) -> Any:
        """Returns the parameters and the optimizers' state that a step has made, of all ranks together."""
        return self._whole(self._updates(step))

    def of_shards(self, step: Event) -> set[tuple[str, str]]:
        """Names and keys of state that ranks hold of their parts of parameters, each a number of its own: a norm, say.

        It is no part of anything; where it makes an update wrong, that is seen.
        """
        from samestep.verification.recording.parts import has_parts

        found: dict[tuple[str, str], list[Any]] = {}
        for values in self._kept(self._updates(step)) if self.is_cut else ():
            for name, state in values["states"].items():
                for key, value in state.items():
                    found.setdefault((name, key), []).append(value)
        plain = {place: values for place, values in found.items() if not has_parts(values)}
        return {
            place for place, values in plain.items() if any(_value_of(one) != _value_of(values[0]) for one in values)
        }

    def _updates(self, step: Event) -> list[Event]:
        updates = self._of_step("updated", step)
        return [events[0] for events in updates] if all(updates) else []

    def state(self, window: int) -> Any:
        """Returns the parameters and buffers with which a window began; None where they were not kept."""
        begun = [[event for event in rank.of("window") if event["number"] == window] for rank in self.ranks]
        if not all(begun) or begun[0][-1]["kept"] is None:
            return None
        return self._whole([events[-1] for events in begun])

    def parameters(self, window: int) -> dict[str, Any]:
        """Returns the parameters of all optimizers with which a window began, if they were kept."""
        state = self.state(window)
        held = [] if state is None else state["parameters"].values()
        return {name: value for parameters in held for name, value in parameters.items()}

    def _kept(self, events: list[Event], key: str = "kept") -> list[Any]:
        """Returns the values that the ranks have kept; `events` are one of each rank."""
        pairs = zip(self.ranks, events, strict=True)
        return [self.value(rank.number, event[key]) for rank, event in pairs if event[key] is not None]

    def _whole(self, events: list[Event]) -> Any:
        from samestep.verification.recording.parts import has_parts, joined

        values = self._kept(events)
        return values[0] if len(values) == 1 and not has_parts(values[0]) else joined(values)

    @cached_property
    def wrappers(self) -> set[str]:
        """What models were wrapped in."""
        return {event["wrapper"] for event in self.ranks[0].of("wrap")} if self.ranks else set()

    @cached_property
    def data(self) -> Record:
        """The ranks that have samples of their own: of those that share a sharded model's batches, the first.

        If optimizers alone hold parts, of models that each rank has whole, all of them have.
        """
        wraps = self.ranks[0].of("wrap")
        if not self.is_cut or not (wraps or any(start.get("cut", True) for start in self.ranks[0].of("start"))):
            return self
        everybody = [rank.number for rank in self.ranks]
        return self.of_ranks(wraps[-1].get("ranks") or everybody if wraps else everybody[:1])

    def of_ranks(self, numbers: Container[int]) -> Record:
        return Record(self.folder, [rank for rank in self.ranks if rank.number in numbers])

    @cached_property
    def is_alike(self) -> bool:
        """Whether the optimizers that step hold the same parameters on all ranks."""
        stepping = {step["optimizer"] for rank in self.ranks for step in rank.steps}
        held = [
            [sorted(event["names"]) for event in rank.of("names") if event["optimizer"] in stepping]
            for rank in self.ranks
        ]
        return all(names == held[0] for names in held)

    @cached_property
    def is_cut(self) -> bool:
        """Whether ranks hold parts of parameters."""
        starts = [event for rank in self.ranks for event in rank.of("start")]
        return any(place_of(digest) for start in starts for digest in start["parameters"].values())

    def value(self, rank: int, number: int) -> Any:
        """Returns a big value. It was written by a process of ours, in a folder of ours."""
        from samestep.instrument.script_io import load_unreported

        return load_unreported(journal.value_path(self.folder, rank, number), weights_only=False)


def _value_of(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _stepped(event: Event, after: dict[str, Any] | None) -> Event:
    """A step with the parameters after it; a step of the script's own code is of the parameters that it changes."""
    step = {**event, "after": after}
    if event.get("by_hand") and after is not None:
        changed = {name: one for name, one in event["gradients"].items() if event["parameters"][name] != after[name]}
        step["gradients"] = changed or event["gradients"]
    return step


@dataclass(frozen=True)
class Run:
    """The script alone: how it ended, and what it has recorded.

    `apart` says why it was given the samples of one rank alone, where those of all cannot be joined.
    """

    ended: Ended
    record: Record
    apart: str | None = None

    @property
    def has_failed(self) -> bool:
        return self.ended.hung or self.ended.code != 0

    @property
    def rank(self) -> Rank:
        """Its process; one without events where it has recorded nothing."""
        return self.record.ranks[0] if self.record.ranks else Rank(0, [])

    @property
    def steps(self) -> dict[int, Event]:
        """Event -> the step, where gradients are kept."""
        return {event["event"]: event for event in self.rank.of("step")}

    def gradients(self, event: int) -> Any:
        return self.record.value(0, self.steps[event]["kept"])

    def turns(self, event: int) -> list[Any]:
        """Returns the gradients of all its steps that stand for one of the ranks'."""
        steps = [step for step in self.rank.of("step") if step["event"] == event]
        return [self.record.value(0, step["kept"]) for step in steps]

    def used(self, event: int) -> Any:
        """Returns the gradients that the optimizer used, where `gradients` are those before clipping; else None."""
        kept = self.steps[event].get("used")
        return None if kept is None else self.record.value(0, kept)

    def update(self, event: int) -> Any:
        """Returns the parameters and the optimizers' state that a step has made; None where they were not kept."""
        updates = [one for one in self.rank.of("updated") if one["event"] == event]
        return self.record.value(0, updates[0]["kept"]) if updates and updates[0]["kept"] is not None else None

    @property
    def is_out_of_step(self) -> bool:
        """Whether it took its steps at other batches than the ranks."""
        return bool(self.rank.of("out_of_step"))

    @property
    def unjoinable(self) -> str | None:
        """Why the ranks' batches could not be made one."""
        events = self.rank.of("unjoinable")
        return events[0]["why"] if events else None


def both(first: Mapping[Key, Value], other: Mapping[Key, Value]) -> Iterator[tuple[Key, Value, Value]]:
    """Yields what two processes both have, in the order of the other."""
    return ((key, first[key], value) for key, value in other.items() if key in first)


def beside_first(ranks: Sequence[Mapping[Key, Value]]) -> Iterator[tuple[int, Key, Value, Value]]:
    """Yields a rank, a key, rank 0's value and the rank's own, for all keys that rank 0 has too."""
    for rank, theirs in enumerate(ranks[1:], 1):
        for pair in both(ranks[0], theirs):
            yield rank, *pair


def line_of(key: str) -> str:
    """Returns the line of a DataLoader's key."""
    return key.rpartition("#")[0]


def pass_of(event: Event) -> PassKey:
    return event["key"], event["number"]


def place_of_draw(draw: Event) -> tuple[int, str]:
    """Returns the window and the line of random numbers that were drawn."""
    window, where = draw["place"].rpartition("|")[0].split("|", 1)  # a path may have one too
    return int(window), where


def reductions(rank: Rank, window: int) -> list[Event]:
    return [call for call in rank.in_window(window, "collective") if call["op"] in REDUCING]


def model_inputs(ranks: Iterable[Rank], windows: Container[int]) -> set[tuple[int, str]]:
    """Returns what the models have seen in some windows, by window; a wrapper may see it once more."""
    inputs = [event for rank in ranks for event in rank.of("input") if event["window"] in windows]
    return {(event["window"], row) for event in inputs for row in event["rows"]}


def of_optimizer(number: int, name: str) -> str:
    """Returns the name of a parameter among those of all optimizers: one of the first has its own.

    >>> of_optimizer(0, "fc.weight"), of_optimizer(1, "fc.weight")
    ('fc.weight', 'optimizer 1: fc.weight')
    """
    return f"optimizer {number}: {name}" if number else name


def calls_in(rank: Rank, window: int) -> list[tuple[str, ...]]:
    """Returns digests of the rows that a rank's models got in a window, for each call; a wrapper records it again."""
    return list(dict.fromkeys(tuple(event["rows"]) for event in rank.in_window(window, "input") if event["rows"]))


def part_at(tensor: Any, place: str) -> Any:
    """Returns the part of a tensor that a digest's place names: "[0, 0]+[2, 3]"."""
    from samestep.verification.recording.parts import region

    return region(tensor, *(json.loads(one) for one in place.split("+")))


def read(folder: Path) -> Record:
    """Returns the record in a folder of journals; of a script that starts its ranks by itself, theirs."""
    if (folder / journal.SPAWNED).is_dir():
        folder /= journal.SPAWNED
    numbers = sorted(int(path.stem.removeprefix("rank")) for path in folder.glob("rank*.jsonl"))
    return Record(folder, [Rank(number, settled(journal.read(folder, number))) for number in numbers])


def settled(events: list[Event]) -> list[Event]:
    """Returns a rank's events with each training batch in the window in which it is used.

        loaded      b0 b1 │    b2 │    b3 │         a script that has to know the last batch loads one early, and one
        backward       b0 │    b1 │    b2 │ b3      that counts a step's tokens first loads a whole step early
        window          0 │     1 │     2 │  3

    Such batches also have "loaded", the window in which they were loaded. Passes over two DataLoaders at once, and
    passes with more or fewer backward passes than batches, stay as they are.
    """
    evaluated = {pass_of(event) for event in events if event["kind"] == "evaluated"}
    done = {pass_of(event) for event in events if event["kind"] == "passed"}
    used: dict[int, Event] = {}
    seen: set[PassKey | None] = set()
    for name, group in groupby(_batches_and_backwards(events, evaluated), lambda pair: pair[0]):
        segment = [event for _, event in group]
        if name is not None and name not in seen and _has_backward_for_each(segment, complete=name in done):
            used |= _moved(segment)
        seen.add(name)
    return [used.get(id(event), event) for event in events]


def _batches_and_backwards(events: list[Event], evaluated: set[PassKey]) -> Iterator[tuple[PassKey | None, Event]]:
    """Yields training batches and backward passes, each with the pass whose batch was loaded last."""
    last: PassKey | None = None
    for event in events:
        is_batch = event["kind"] == "batch" and event["training"] and pass_of(event) not in evaluated
        if is_batch:
            last = pass_of(event)
        if is_batch or event["kind"] == "backward":
            yield last, event


def _has_backward_for_each(segment: list[Event], *, complete: bool) -> bool:
    """Whether every batch has its backward pass; of a pass that was cut short, all but those loaded early."""
    early = [0]
    for event in segment:
        early.append(early[-1] + (1 if event["kind"] == "batch" else -1))
    if min(early) < 0:
        return False
    first = next((index for index, event in enumerate(segment) if event["kind"] == "backward"), len(segment))
    return early[-1] == 0 if complete else max(early) <= early[first]


def _moved(segment: list[Event]) -> dict[int, Event]:
    batches = [event for event in segment if event["kind"] == "batch"]
    backwards = [event for event in segment if event["kind"] == "backward"]
    pairs = zip(batches, backwards, strict=False)  # the last ones may have been loaded for nothing
    return {id(batch): {**batch, "loaded": batch["window"], "window": one["window"]} for batch, one in pairs}
