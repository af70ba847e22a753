"""A run of the script alone, as a judge sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.runs import Ended

__all__: list[str] = []


@dataclass(frozen=True)
class Run:
    """The script alone: how it ended, and what it has written down.

    Attributes:
        ended: how.
        record: what it has written.
        apart: why it was given the samples of one rank alone, where those of all cannot be joined.
    """

    ended: Ended
    record: Record
    apart: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it did not end well."""
        return self.ended.hung or self.ended.code != 0

    @property
    def steps(self) -> dict[int, Event]:
        """Event -> the step, where gradients are kept."""
        ranks = self.record.ranks
        return {event["event"]: event for event in ranks[0].of("step")} if ranks else {}

    def gradients(self, event: int) -> Any:
        """Returns the gradients at a step."""
        return self.record.value(0, self.steps[event]["kept"])

    def turns(self, event: int) -> list[Any]:
        """Returns the gradients of all its steps that stand for one of the ranks'."""
        told = [one for rank in self.record.ranks for one in rank.of("step") if one["event"] == event]
        return [self.record.value(0, one["kept"]) for one in told]

    def used(self, event: int) -> Any:
        """Returns those that the optimizer used, where `gradients` are those before clipping; else None."""
        kept = self.steps[event].get("used")
        return None if kept is None else self.record.value(0, kept)

    def update(self, event: int) -> Any:
        """Returns the parameters and the optimizers' state that a step has made; None where they were not kept."""
        told = [one for rank in self.record.ranks for one in rank.of("updated") if one["event"] == event]
        return self.record.value(0, told[0]["kept"]) if told and told[0]["kept"] is not None else None

    @property
    def is_out_of_step(self) -> bool:
        """Whether it took its steps at other batches than the ranks."""
        return any(rank.of("out_of_step") for rank in self.record.ranks)

    @property
    def unjoinable(self) -> str | None:
        """Why the ranks' batches could not be made one."""
        events = self.record.ranks[0].of("unjoinable") if self.record.ranks else []
        return events[0]["why"] if events else None
