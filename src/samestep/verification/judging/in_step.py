"""Whether the script alone takes its steps at the same batches as the ranks, and as many.

A decision to skip a step, or to stop, may depend on the weights, so it is judged only where one process had the ranks'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from samestep.text import plural
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.passes import are_loaded, passes
from samestep.verification.judging.record import Rank, Record, Run, model_inputs, place_of_draw
from samestep.verification.judging.resumed import resumed

_TOGETHER = "let the decision depend on what all ranks know: reduce it"


@dataclass
class InStep:
    """Compares the steps of the ranks with those of the script alone, `whole`, which is given their batches."""

    record: Record
    whole: Run

    @cached_property
    def _apart(self) -> list[Event]:
        """What the script alone has recorded of steps that it ends at other batches."""
        return self.whole.rank.of("out_of_step")

    @property
    def _skips(self) -> bool:
        """Whether a scaler leaves out steps of the ranks."""
        return any(event["skipped"] for event in self.record.ranks[0].of("scaler"))

    @cached_property
    def astray(self) -> set[int]:
        """The windows that it ends at other batches because its scaler finds another scale."""
        spans = [(event["window"], event["own"]) for event in self._apart] if self._skips else []
        return {window for ends in spans for window in range(min(ends), max(ends) + 1)}

    @property
    def is_in_step(self) -> bool:
        """Whether it ends its steps at the ranks' batches, and takes as many."""
        return not self._apart and not self.whole.has_failed and self._goes_on is None

    @property
    def may_accumulate_in_turn(self) -> bool:
        """Whether one process may take the ranks' steps if it gets their micro-batches one after the other.

        Ranks may accumulate so many that all together have one number: given theirs joined, one process takes more.
        """
        ran_out = (self.whole.ended.failure or {}).get(
            "exception"
        ) == "StopIteration"  # it has used all that it was given
        is_known = (ran_out or not self.whole.has_failed) and self.whole.unjoinable is None and are_loaded(self.record)
        return is_known and self._is_a_difference and not self._skips

    @property
    def until(self) -> float:
        """The first window that it ends at other batches, but for a scaler's."""
        return math.inf if self._skips or not self._apart else _begin(self._apart[0])

    @property
    def unknown(self) -> str | None:
        """Why it is not known whether one process takes the ranks' steps; None where it is known."""
        if not self._is_a_difference:
            return self._unknown_end
        first = self._apart[0]
        if self._skips or self._is_skip_behind_load:
            return None
        if self.whole.apart is not None:
            return f"from step {_begin(first)} on one process, with the samples of one rank, steps at other batches"
        if (draws := chance_of(self.whole)) is not None:
            return f"from step {_begin(first)} on one process steps at other batches; {draws}"
        if first["placed"] or skipper(self.record) is not None:
            return None
        return f"from step {_begin(first)} on one process steps at other batches, from weights of its own"

    @property
    def may_become_known(self) -> bool:
        """Whether it is not known, and would be if one process had the ranks' weights in all steps."""
        return self.unknown is not None and chance_of(self.whole) is None and self.whole.apart is None

    @property
    def _is_a_difference(self) -> bool:
        uneven = self.record.uneven
        return bool(self._apart) and (uneven is None or _begin(self._apart[0]) < self.record.steps)

    @property
    def _is_skip_behind_load(self) -> bool:
        """Whether ranks skip batches there behind a load; how many, one process may count otherwise."""
        window = _begin(self._apart[0])
        return any(
            window in {batch["window"] for batch in one.skipped} for rank in self.record.ranks for one in resumed(rank)
        )

    def findings(self) -> Iterator[Finding]:
        """Yields what one process does otherwise, from the same weights."""
        if not self._is_a_difference or self._skips or self._is_skip_behind_load:
            yield from self._ends() if not self._apart else ()
            return
        first, rank = self._apart[0], skipper(self.record)
        if self.unknown is not None:
            return
        window = _begin(first)
        does = "takes a step that the ranks do not take" if first["own"] > window else "skips a step of the ranks"
        who = "" if rank is None else f"; rank {rank} leaves out a batch that the others train on"
        steps = [step for step in self.record.ranks[0].steps if step["window"] >= window]
        yield Finding(
            code="steps-differ",
            rank=rank,
            step=window,
            where=steps[0]["where"] if steps else None,
            cause=f"given all samples of step {window}, one process {does}{who}",
            fix=_TOGETHER,
        )

    @cached_property
    def _goes_on(self) -> bool | None:
        """Whether one process goes on where the ranks have come to their end, or ends before; None where it does not.

        Steps are counted where the ranks' batches are given to it: else it takes as many as it likes.
        """
        alone = self.whole.rank
        is_whole = all(rank.is_complete for rank in self.record.ranks) and not self.record.is_cut_short
        if alone.ended is None or not is_whole or not _reads_alone(self.record, alone):
            return None
        if self.record.uneven is not None or alone.ended["error"] is not None or self.whole.has_failed:
            return None
        if self.whole.unjoinable is not None or self.whole.apart is not None:
            return None  # it was ended there, or has other samples
        taken, steps = len(alone.of("rates")), len(self.record.ranks[0].steps)
        if alone.ended["enough"] or taken > steps:
            return True
        return False if taken < steps else None

    @property
    def _unknown_end(self) -> str | None:
        if self._goes_on is None:
            return None
        if (draws := chance_of(self.whole)) is not None:
            return f"one process ends after another number of steps; {draws}"
        if all(event["kept"] is not None for event in self.record.ranks[0].of("window")):
            return None  # it had the ranks' weights in all steps
        return "one process, with weights of its own, ends after another number of steps"

    def _ends(self) -> Iterator[Finding]:
        if self._goes_on is None or self._unknown_end is not None:
            return
        steps = len(self.record.ranks[0].steps)
        does = "goes on" if self._goes_on else "has ended before"
        yield Finding(
            code="steps-differ",
            step=steps,
            where=self.record.ranks[0].steps[-1]["where"],
            cause=f"the ranks end after {plural(steps, 'step')}; one process, from the same weights, {does}",
            fix=_TOGETHER,
        )


def _begin(event: Event) -> int:
    return min(int(event["window"]), int(event["own"]))


def chance_of(whole: Run) -> str | None:
    """Returns why the ranks' random numbers could not be handed to one process; None where they could."""
    event = next(iter(whole.rank.of("chance")), None)
    if event is None:
        return None
    where = place_of_draw(event)[1]
    return f"each rank draws by itself at {where} ({event['name']}), and one process cannot draw the same"


def _reads_alone(record: Record, alone: Rank) -> bool:
    """Whether all steps of the ranks are of batches that DataLoaders have yielded, or that one process takes too."""
    rank = record.ranks[0]
    if not are_loaded(record):
        windows = {step["window"] for step in rank.steps} & {event["event"] for event in alone.of("rates")}
        theirs = model_inputs([alone], windows)
        return bool(theirs) and theirs == model_inputs(record.data.ranks, windows)
    read = {batch["window"] for one in passes(rank) if one.is_training for batch in one.batches}
    return {step["window"] for step in rank.steps} <= read


def skipper(record: Record) -> int | None:
    """Returns the first rank that goes on to its next batch without a backward pass where others have one."""
    for used in zip(*map(_used, record.ranks), strict=False):
        if True in used and False in used:
            return record.ranks[used.index(False)].number
    return None


def _used(rank: Rank) -> list[bool]:
    """Whether a backward pass came before the next batch, for each training batch but the last."""
    used: list[bool] = []
    for event in rank.of("batch", "backward"):
        if event["kind"] == "batch" and event["training"]:
            used.append(False)
        elif event["kind"] == "backward" and used:
            used[-1] = True
    return used[:-1]
