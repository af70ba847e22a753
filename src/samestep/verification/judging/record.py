"""What all ranks of a run have written down, sorted for a judge."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep.verification import journal
from samestep.verification.journal import Event, place_of
from samestep.verification.judging.ahead import settled
from samestep.verification.judging.averaged import Averaged

__all__: list[str] = []

BY_THEMSELVES = "each rank first trains models of its own; one process trains all of them, in other steps"
_UNITS = {"float16": 2**-11, "bfloat16": 2**-8}  # roundoff of types in which gradients may be sent
REDUCING = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor"}


@dataclass(frozen=True)
class Rank:
    """One rank's events, in their order."""

    number: int
    events: list[Event]

    def of(self, *kinds: str) -> list[Event]:
        """Returns the events of some kinds."""
        return [event for event in self.events if event["kind"] in kinds]

    @cached_property
    def size(self) -> int:
        """How many ranks there were."""
        begun = self.of("begin")
        return int(begun[0]["size"]) if begun else 1

    @cached_property
    def steps(self) -> list[Event]:
        """The optimizer steps; each with "after", the parameters' digests behind it, where it came to that."""
        after = {event["event"]: event["parameters"] for event in self.of("stepped")}
        return [_stepped(event, after.get(event["event"])) for event in self.of("step")]

    @cached_property
    def by_window(self) -> dict[int, list[Event]]:
        """Window -> what happened in it."""
        windows: dict[int, list[Event]] = {}
        for event in self.events:
            if "window" in event:
                windows.setdefault(event["window"], []).append(event)
        return windows

    def backward_of(self, step: Event) -> str:
        """Returns the line of the first backward pass of a step; that of the step itself where there is none."""
        window = self.by_window.get(step["window"], [])
        where: str = next((one["where"] for one in window if one["kind"] == "backward"), step["where"])
        return where

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
    """The ranks of a run that trained, in order.

    Attributes:
        folder: of their values.
        ranks: in order.
        stepped: event -> the gradients with which the script's own code steps, where others lay there before.
    """

    folder: Path
    ranks: list[Rank]
    stepped: Mapping[int, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    @cached_property
    def steps(self) -> int:
        """How many optimizer steps all of them have taken together: until one has used its inputs up, under Join."""
        taken = min((len(rank.steps) for rank in self.ranks), default=0)
        return taken if self.uneven is None else min(taken, self.uneven["event"])

    @property
    def micro_batches(self) -> int:
        """How many backward passes each step of each rank has; 0 where not all have as many."""
        told = {int(step["micro"]) for rank in self.data.ranks for step in rank.steps}
        return told.pop() if len(told) == 1 else 0

    @cached_property
    def has_no_group(self) -> bool:
        """Whether no rank was in a process group at any of its steps."""
        told = [step.get("in_group", True) for rank in self.ranks for step in rank.steps]
        return bool(told) and not any(told)

    @cached_property
    def is_cut_short(self) -> bool:
        """Whether the recording has ended a rank, or a pass over its data, before the script did."""
        cut = any(event.get("cut") is not None for rank in self.ranks for event in rank.of("passed"))
        return cut or any(rank.ended is not None and rank.ended["enough"] for rank in self.ranks)

    @cached_property
    def asked(self) -> int:
        """How many of the steps were asked for: those behind them only reach what stands behind a pass."""
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
        """Returns the step of that number, of every rank."""
        return [rank.steps[index] for rank in self.ranks]

    def gradients(self, step: Event) -> Any:
        """Returns the gradients of a step whose values were kept, those that were compressed as they were before."""
        told = self.compressed(step)
        return self.used(step) if not told.models else dict(zip(step["gradients"], told.brought(), strict=True))

    def compressed(self, step: Event) -> Averaged:
        """Returns what the ranks recorded of a step's compressed gradients."""
        told = [[one for one in rank.of("compressed") if one["event"] == step["event"]] for rank in self.ranks]
        return Averaged(told, self.value)

    def used(self, step: Event) -> Any:
        """Returns the gradients with which the optimizer steps; what is cut is put together from all ranks.

        The script's own code may average them when it steps: then those that lie there before are each rank's own.
        """
        if self.averages_within(step):
            from samestep.verification.numerics import mean

            known = self.stepped.get(step["event"])
            parts = self.parts(step) if known is None else []
            if known is not None or parts:
                return mean(parts) if known is None else known
        return self._whole([rank.steps[step["event"]] for rank in self.ranks])

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

        No model is wrapped, and nothing is reduced before their steps on any rank, as it is before those of others.
        """
        found: set[int] = set()
        for rank in [] if self.wrappers else self.ranks:
            reduces = [
                any(
                    event["kind"] == "collective" and event["op"] in REDUCING
                    for event in rank.by_window[step["window"]]
                )
                for step in rank.steps
            ]
            begun = reduces.index(True) if True in reduces else 0
            found |= {step["optimizer"] for step in rank.steps[:begun]} - {
                one["optimizer"] for one in rank.steps[begun:]
            }
        return found

    def averages_within(self, step: Event) -> bool:
        """Whether a step may average gradients itself: own code steps, or it makes equal parameters of unequal ones."""
        if step.get("by_hand"):
            return True
        events = [rank.steps[step["event"]] for rank in self.ranks]
        if self.is_cut or any(event.get("after") is None for event in events):
            return False
        differ = any(event["gradients"] != events[0]["gradients"] for event in events)
        return differ and all(event["after"] == events[0]["after"] for event in events)

    def parts(self, step: Event) -> list[Any]:
        """Returns what each rank had for a gradient before the script's own code averaged it, if that was kept."""
        if not step.get("by_hand"):
            return self.own(step) or []
        events = [(rank.number, rank.steps[step["event"]]) for rank in self.ranks]
        told = [self.value(number, event["kept"]) for number, event in events if event["kept"] is not None]
        return [{name: one[name] for name in step["gradients"] if name in one} for one in told]

    def own(self, step: Event) -> list[Any] | None:
        """Returns what each rank's backward passes have brought by themselves; None where some rank has not kept it."""
        events = [rank.steps[step["event"]] for rank in self.ranks]
        if any(event.get("own") is None for event in events):
            return None
        return [self.value(rank.number, event["own"]) for rank, event in zip(self.ranks, events, strict=True)]

    @property
    def kept_steps(self) -> list[Event]:
        """The first rank's steps whose values were kept, on all ranks that keep any."""
        steps = self.ranks[0].steps[: self.steps]
        return [step for step in steps if step["kept"] is not None and self.is_seen_by_all(step)]

    def is_seen_by_all(self, step: Event) -> bool:
        """Whether every rank that keeps gradients, or tells its samples, did so at this step.

        Where one rank evaluates by itself, it alone looks at the step behind its evaluation.
        """
        keeping = [rank for rank in self.ranks if any(one["kept"] is not None for one in rank.steps)]
        kept = [rank.steps[step["event"]]["kept"] is not None for rank in keeping]
        told = {any(one["kind"] == "input" for one in rank.by_window.get(step["window"], [])) for rank in self.ranks}
        return all(kept) and len(told) <= 1

    def updated(self, step: Event) -> Event | None:
        """Returns what the first rank told of a step's update; None where it was not kept."""
        told = self._updates(step)
        return told[0] if told and told[0]["kept"] is not None else None

    def carries_apart(self, step: Event) -> bool:
        """Whether replicas have other state of one parameter behind a step: what one has not sent yet, say."""
        known: dict[str, Any] = {}
        told = [(name, one) for event in self._updates(step) for name, one in (event.get("carried") or {}).items()]
        return not self.is_cut and any(known.setdefault(name, one) != one for name, one in told)

    def sent_in(self, step: Event) -> float:
        """Returns the unit roundoff of the coarsest type in which ranks reduce anything in a step; 0 of full ones."""
        window = self.ranks[0].by_window.get(step["window"], [])
        calls = [one for one in window if one["kind"] == "collective" and one["op"] in REDUCING]
        return max((_UNITS.get(dtype, 0.0) for one in calls for dtype in one["dtypes"]), default=0.0)

    def update(self, step: Event) -> Any:
        """Returns the parameters and the optimizers' state that a step has made, of all ranks together."""
        return self._whole(self._updates(step))

    def _updates(self, step: Event) -> list[Event]:
        told = [[one for one in rank.of("updated") if one["event"] == step["event"]] for rank in self.ranks]
        return [events[0] for events in told] if all(told) else []

    def state(self, window: int) -> Any:
        """Returns the parameters and buffers with which a window began; None where they were not kept."""
        told = [[event for event in rank.of("window") if event["number"] == window] for rank in self.ranks]
        return self._whole([events[-1] for events in told]) if all(told) and told[0][-1]["kept"] is not None else None

    def _whole(self, events: list[Event]) -> Any:
        told = [
            self.value(rank.number, one["kept"])
            for rank, one in zip(self.ranks, events, strict=True)
            if one["kept"] is not None
        ]
        if len(told) == 1:
            return told[0]
        from samestep.verification.recording.parts import joined

        return joined(told)

    @cached_property
    def wrappers(self) -> set[str]:
        """What models were wrapped in."""
        return {event["wrapper"] for event in self.ranks[0].of("wrap")} if self.ranks else set()

    @cached_property
    def data(self) -> Record:
        """The ranks that have samples of their own: of those that share a sharded model's batches, the first."""
        if not self.is_cut:
            return self
        wraps = self.ranks[0].of("wrap")
        everybody = [rank.number for rank in self.ranks]
        chosen = wraps[-1].get("ranks") or everybody if wraps else everybody[:1]
        return Record(self.folder, [rank for rank in self.ranks if rank.number in chosen])

    @cached_property
    def is_alike(self) -> bool:
        """Whether the optimizers that step hold the same parameters on all ranks."""
        stepping = {step["optimizer"] for rank in self.ranks for step in rank.steps}
        told = [
            [sorted(event["names"]) for event in rank.of("names") if event["optimizer"] in stepping]
            for rank in self.ranks
        ]
        return all(names == told[0] for names in told)

    @cached_property
    def is_cut(self) -> bool:
        """Whether ranks hold parts of parameters."""
        starts = [event for rank in self.ranks for event in rank.of("start")]
        return any(place_of(digest) for start in starts for digest in start["parameters"].values())

    def value(self, rank: int, number: int) -> Any:
        """Returns a big value. It was written by a process of ours, in a folder of ours."""
        from samestep.instrument.script_io import load_unreported

        return load_unreported(journal.value_path(self.folder, rank, number), weights_only=False)


def _stepped(event: Event, after: dict[str, Any] | None) -> Event:
    """A step and what is behind it; one of the script's own code is of the parameters that it changes."""
    step = {**event, "after": after}
    if event.get("by_hand") and after is not None:
        changed = {name: one for name, one in event["gradients"].items() if event["parameters"][name] != after[name]}
        step["gradients"] = changed or event["gradients"]
    return step


def model_inputs(ranks: Iterable[Rank], windows: Container[int]) -> set[tuple[int, str]]:
    """Returns what the models have seen in some windows, by window; a wrapper may see it once more."""
    inputs = [event for rank in ranks for event in rank.of("input") if event["window"] in windows]
    return {(event["window"], row) for event in inputs for row in event["rows"]}


def part_at(tensor: Any, place: str) -> Any:
    """Returns the part of a tensor that a digest's place names: "[0, 0]+[2, 3]"."""
    from samestep.verification.recording.parts import region

    return region(tensor, *(json.loads(one) for one in place.split("+")))


def read(folder: Path) -> Record:
    """Returns what lies in a folder of journals; of a script that starts its ranks by itself, those."""
    if (folder / journal.SPAWNED).is_dir():
        folder /= journal.SPAWNED
    numbers = sorted(int(path.stem.removeprefix("rank")) for path in folder.glob("rank*.jsonl"))
    ranks = [Rank(number, settled(journal.read(folder, number))) for number in numbers]
    return Record(folder, ranks)
