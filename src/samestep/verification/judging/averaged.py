"""The compressed gradients of one optimizer step, as the ranks recorded them.

The mean of the ranks' own is compared with one process, what they were averaged to with the codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.verification.journal import Event


@dataclass(frozen=True)
class Averaged:
    """The events of one step."""

    # of each rank, an event for each compressed model whose parameters the optimizer holds
    events: Sequence[Sequence[Event]]
    value: Callable[[int, int], Any]  # returns what a rank, by its number, has kept

    @property
    def models(self) -> list[tuple[Event, ...]]:
        """For each model, the events of all ranks; none where nothing was compressed."""
        return list(zip(*self.events, strict=False))

    def why_not(self, step: Event) -> str | None:
        """Returns why the step's gradients cannot be judged; None where they can, or were not compressed."""
        events = [event for theirs in self.events for event in theirs]
        if not events:
            return None
        if any(len(theirs) != len(self.events[0]) for theirs in self.events):
            return "the ranks compress the gradients of different models"
        if (why := next((event["why"] for event in events if event["why"]), None)) is not None:
            return str(why)
        if any(event["size"] != len(self.events) for event in events):
            return f"gradients are compressed in groups of {events[0]['size']} ranks"
        if any(event["kept"] is None for event in events):
            return "there was no room to keep what the ranks brought before it was compressed"
        covered = [any(names) for names in zip(*(event["names"] for event in self.events[0]), strict=True)]
        bare = [name for name, is_in in zip(step["gradients"], covered, strict=True) if not is_in]
        mixed = any(step["gradients"][name] is not None for name in bare)
        return "an optimizer holds gradients that are compressed and others that are not" if mixed else None

    def values(self, model: Sequence[Event]) -> list[dict[str, Any]]:
        """Returns what each rank kept of one of `models`: "before", "own", and on the first rank "averaged"."""
        return [self.value(rank, event["kept"]) for rank, event in enumerate(model)]

    def brought(self) -> list[Any]:
        """Returns the mean of the ranks' own gradients, in the optimizer's order, without a scaler's factor."""
        return self._in_order(
            (model[0], _means([kept["own"] for kept in self.values(model)], model[0]["scale"])) for model in self.models
        )

    def got(self) -> list[Any]:
        """Returns the averaged gradients, in the optimizer's order, without a scaler's factor."""
        first = ((model[0], self.values(model[:1])[0]["averaged"]) for model in self.models)
        return self._in_order(
            (event, {name: one / event["scale"] for name, one in averaged.items()}) for event, averaged in first
        )

    def _in_order(self, models: Iterator[tuple[Event, dict[str, Any]]]) -> list[Any]:
        found: list[Any] = [None] * len(self.events[0][0]["names"])
        for event, values in models:
            for index, name in enumerate(event["names"]):
                if name in values:
                    found[index] = values[name]
        return found


def _means(own: Sequence[dict[str, Any]], scale: float) -> dict[str, Any]:
    """The means, rounded once, to the parts' own type, whose rounding gradients are allowed."""
    means = {}
    for name, first in own[0].items():
        total = sum(theirs[name].double().to(first.device) for theirs in own)
        means[name] = (total / (len(own) * scale)).to(first.dtype)
    return means
