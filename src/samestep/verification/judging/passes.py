"""The passes of ranks over their DataLoaders: which samples each has yielded, and whether they were trained on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from samestep.verification.journal import Event
from samestep.verification.judging.record import PassKey, Rank, Record, line_of, pass_of


@dataclass(frozen=True)
class Pass:
    """One pass of one rank over one DataLoader; `rest` has batches that it would have yielded, had it not been cut."""

    rank: int
    about: Event
    batches: list[Event]
    complete: bool
    backwards: int
    rest: list[list[int]] | None = None

    @property
    def key(self) -> PassKey:
        return pass_of(self.about)

    @property
    def line(self) -> str:
        """Where its DataLoader was made."""
        return line_of(self.about["key"])

    @property
    def number(self) -> int:
        return int(self.about["number"])

    @property
    def sampler(self) -> str:
        return str(self.about["sampler"])

    @property
    def size(self) -> int | None:
        """How many samples the dataset has."""
        size: int | None = self.about["samples"]
        return size

    @cached_property
    def parts(self) -> list[list[int]] | None:
        """The samples' indices, batch by batch, those of the rest too; None where there are none."""
        if not self.batches or any(batch["indices"] is None for batch in self.batches):
            return None
        return [*(batch["indices"] for batch in self.batches), *(self.rest or [])]

    @cached_property
    def indices(self) -> list[int] | None:
        """The samples' indices, in order; None where there are none."""
        return None if self.parts is None else [index for part in self.parts for index in part]

    @property
    def is_known(self) -> bool:
        """Whether all its samples are known by their indices, though not all of them may have been loaded."""
        return self.complete or self.rest is not None

    @cached_property
    def rows(self) -> list[str]:
        """The samples' digests, in order."""
        return [row for batch in self.batches for row in batch["rows"]]

    @property
    def order(self) -> list[Any]:
        return self.rows if self.indices is None else self.indices

    @property
    def is_training(self) -> bool:
        return self.backwards > 0

    @property
    def divided_at(self) -> str:
        """The line that gives the rank its samples: of a DistributedSampler, else of the loader."""
        return self.about.get("sampler_made") or self.line


def passes(rank: Rank) -> list[Pass]:
    """Returns a rank's passes, in the order in which they began."""
    batches: dict[PassKey, list[Event]] = {}
    for event in rank.of("batch"):
        batches.setdefault(pass_of(event), []).append(event)
    done = {pass_of(event) for event in rank.of("passed") if event.get("cut") is None}
    rest = {pass_of(event): event["indices"] for event in rank.of("rest")}
    trained = _trained(rank)
    return [
        Pass(rank.number, event, batches.get(name, []), name in done, trained[name], rest.get(name))
        for event in rank.of("pass")
        for name in [pass_of(event)]
    ]


def _trained(rank: Rank) -> Counter[PassKey]:
    """How many backward passes began while each pass had yielded a batch, and none had begun to load after it."""
    counts: Counter[PassKey] = Counter()
    yielded: set[PassKey] = set()
    over: set[PassKey] = set()  # but for a batch that was loaded ahead
    for event in rank.of("batch", "passed", "backward"):
        if event["kind"] == "backward":
            counts.update(yielded)
            yielded.clear()
        elif event["kind"] == "passed":
            over.add(pass_of(event))
        else:
            left = {name for name in yielded if name[0] == event["key"] and name[1] != event["number"]}  # looked into
            yielded -= over | left
            over.clear()
            yielded |= {pass_of(event)} if event["training"] else set()
    return counts


def are_loaded(record: Record) -> bool:
    """Returns whether a DataLoader tells the samples that are trained on; one may be used for evaluations alone."""
    return any(event["training"] for rank in record.ranks for event in rank.of("batch"))


def cut_after_loading(record: Record) -> bool:
    """Returns whether all ranks load the same batches, and the model of each gets a part of its own of them."""
    ranks = record.data.ranks
    found = [_used_of_loaded(rank) for rank in ranks]
    windows = [window for window in found[0] if all(window in theirs for theirs in found)] if len(found) > 1 else []
    for window in windows:
        loaded, used = zip(*(theirs[window] for theirs in found), strict=True)
        together: set[str] = set().union(*used)
        is_one = bool(loaded[0]) and all(batches == loaded[0] for batches in loaded)
        if not is_one or sum(map(len, used)) > len(together) or len(together) > sum(map(len, loaded[0])):
            return False
    return bool(windows)


def is_cut_as_alone(record: Record, alone: Record) -> bool:
    """Returns whether all ranks load the batches of one process, and models get as many rows of them as its model.

    Views of samples that each rank draws are other rows than those that were loaded.
    """
    own, found = _used_of_loaded(alone.ranks[0]), [_used_of_loaded(rank) for rank in record.data.ranks]
    windows = [window for window in own if all(window in theirs for theirs in found)]
    return bool(windows) and all(
        all(theirs[window][0] == own[window][0] for theirs in found)
        and sum(len(theirs[window][1]) for theirs in found) == len(own[window][1])
        for window in windows
    )


def _used_of_loaded(rank: Rank) -> dict[int, tuple[list[list[str]], set[str]]]:
    """Window -> the rows of each batch that was loaded in it, and those that models got of them."""
    found: dict[int, tuple[list[list[str]], set[str]]] = {}
    for event in rank.of("used"):
        found.setdefault(event["window"], ([], set()))[1].update(event["rows"])
    for event in rank.of("batch"):
        if event["training"] and event["window"] in found:
            found[event["window"]][0].append(event["rows"])
    return found


def loads_for_all(record: Record) -> int | None:
    """Returns the one rank that loads what all train on, and sends it on; None where several load."""
    loading = [rank.number for rank in record.ranks if any(one.is_training for one in passes(rank))]
    return loading[0] if len(loading) == 1 < record.size else None


def together(record: Record) -> list[list[Pass]]:
    """Returns the passes that all ranks have made, one list for each."""
    mine = [{one.key: one for one in passes(rank)} for rank in record.ranks]
    return [[theirs[key] for theirs in mine] for key in mine[0] if all(key in theirs for theirs in mine)]
