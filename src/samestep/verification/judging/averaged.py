"""The compressed gradients of one optimizer step, as the ranks recorded them.

    rank 0   own g₀   owed m₀   ┐                        ┌ ā
    rank 1   own g₁   owed m₁   ┴──►  codec, declared ──►┴ ā         step with ā, or with what clipping makes of it

The mean of g₀, g₁, … is what would be averaged without compression, and is held against one process; ā is held against
the codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.verification.journal import Event

__all__: list[str] = []

Value = Callable[[int, int], Any]  # of a rank, by its number


@dataclass(frozen=True)
class Averaged:
    """Of one step.

    Attributes:
        told: of each rank, an event for each compressed model whose parameters the optimizer holds.
        value: returns what a rank has kept.
    """

    told: Sequence[Sequence[Event]]
    value: Value

    @property
    def models(self) -> list[tuple[Event, ...]]:
        """For each model, the events of all ranks; none where nothing was compressed."""
        return list(zip(*self.told, strict=False))

    def why_not(self, step: Event) -> str | None:
        """Returns why the step's gradients cannot be judged; None where they can, or were not compressed."""
        events = [event for theirs in self.told for event in theirs]
        if not events:
            return None
        if any(len(theirs) != len(self.told[0]) for theirs in self.told):
            return "the ranks compress the gradients of different models"
        if (why := next((event["why"] for event in events if event["why"]), None)) is not None:
            return str(why)
        if any(event["size"] != len(self.told) for event in events):
            return f"gradients are compressed in groups of {events[0]['size']} ranks"
        if any(event["kept"] is None for event in events):
            return "there was no room to keep what the ranks brought before it was compressed"
        covered = [any(names) for names in zip(*(event["names"] for event in self.told[0]), strict=True)]
        bare = [name for name, is_in in zip(step["gradients"], covered, strict=True) if not is_in]
        mixed = any(step["gradients"][name] is not None for name in bare)
        return "an optimizer holds gradients that are compressed and others that are not" if mixed else None

    def values(self, model: Sequence[Event]) -> list[dict[str, Any]]:
        """Returns what each rank kept of one of `models`: "before", "own", and on the first rank "averaged"."""
        return [self.value(rank, event["kept"]) for rank, event in enumerate(model)]

    def brought(self) -> list[Any]:
        """Returns the mean of the ranks' own gradients, in the optimizer's order, without a scaler's factor."""
        means: list[Any] = [None] * len(self.told[0][0]["names"])
        for model in self.models:
            own = [kept["own"] for kept in self.values(model)]
            for index, name in enumerate(model[0]["names"]):
                if name in own[0]:
                    means[index] = _mean([theirs[name] for theirs in own], model[0]["scale"])
        return means

    def got(self) -> list[Any]:
        """Returns the averaged gradients likewise."""
        found: list[Any] = [None] * len(self.told[0][0]["names"])
        for model in self.models:
            averaged = self.values(model[:1])[0]["averaged"]
            for index, name in enumerate(model[0]["names"]):
                if name in averaged:
                    found[index] = averaged[name] / model[0]["scale"]
        return found


def _mean(parts: Sequence[Any], scale: float) -> Any:
    """Rounded once, to the parts' own type, whose rounding gradients are allowed."""
    total = sum(part.double().to(parts[0].device) for part in parts)
    return (total / (len(parts) * scale)).to(parts[0].dtype)
