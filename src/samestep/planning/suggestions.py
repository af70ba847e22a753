"""What to change next, and what it would give: every change is predicted as the plan itself was.

    change                              the plan with
      load samples beside the step        no waiting for data
      a network of twice the bandwidth    twice that of all links
      …
                                        gain: samples a second then over those of now, with as many ranks

A change is of the set-up, unless it says that the training is another one: then it is told last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samestep.planning.planner import Planner
from samestep.planning.step import PredictedStep

__all__: list[str] = []

MIN_GAIN = 0.02  # of the samples a second, below which a change is not suggested
INT8_BITS = 8.125  # of each gradient of 32 bits: its code, and its share of a scale of 32 bits for 256
PASSES = 6  # over each gradient, to encode it and to decode it, each as slow as adding


@dataclass(frozen=True)
class Suggestion:
    what: str  # to do, in words
    step: PredictedStep  # as it would be then
    gain: float  # samples a second then, over those of now, less 1
    same: bool = True  # whether it stays the same training

    def __str__(self) -> str:
        another = "" if self.same else " (another training)"
        return f"{self.what}: {100 * self.gain:+.0f} %{another}"


def of_setup(planner: Planner, ranks: int, adding_bytes_per_s: float = float("inf")) -> list[Suggestion]:
    """Returns what would help with so many ranks; how fast a rank adds says what encoding takes."""
    found: list[Suggestion] = []
    for what, other, same in _others(planner, adding_bytes_per_s):
        found += gain_of(what, planner, other(), ranks, same=same)
    return ordered(found)


def ordered(found: Sequence[Suggestion]) -> list[Suggestion]:
    return sorted(found, key=lambda one: (not one.same, -one.gain))


def gain_of(what: str, planner: Planner, other: Planner, ranks: int, *, same: bool = True) -> Iterator[Suggestion]:
    """Yields the change to another planner, if it is worth while with so many ranks."""
    now, then = planner.predict(ranks).best, other.predict(ranks).best
    if now is not None and then is not None and then.rate > (1 + MIN_GAIN) * now.rate:
        yield Suggestion(what, then, then.rate / now.rate - 1, same)


def compressed(planner: Planner, adding_bytes_per_s: float) -> Planner:
    """Returns the planner with gradients of 8 bits, whose coding costs PASSES of so many bytes a second."""
    coding = PASSES / adding_bytes_per_s
    return replace(planner, fabric=replace(planner.fabric, bytes_scale=INT8_BITS / 32, coding_s=coding))


def _others(planner: Planner, adding: float) -> Iterator[tuple[str, Callable[[], Planner], bool]]:
    profile, fabric = planner.profile, planner.fabric
    yield "load samples beside the step (workers=)", lambda: _with(planner, data_s=0.0), True
    yield "a network of twice the bandwidth", lambda: _on(planner, bandwidth_scale=2 * fabric.bandwidth_scale), True
    yield "a network of half the latency", lambda: _on(planner, latency_scale=fabric.latency_scale / 2), True
    yield "devices twice as fast", lambda: replace(planner, speed=2 * planner.speed), True
    if profile.other_s > 0:
        yield (
            "leave out what the script does beside model, data and optimizer",
            lambda: _with(planner, other_s=0.0),
            True,
        )
    yield 'gradients of 8 bits (compress="int8")', lambda: compressed(planner, adding), False
    yield "a batch twice as large", lambda: replace(planner, batch_factor=2 * planner.batch_factor), False


def _with(planner: Planner, **seconds: Any) -> Planner:
    return replace(planner, profile=replace(planner.profile, **seconds))


def _on(planner: Planner, **scales: Any) -> Planner:
    return replace(planner, fabric=replace(planner.fabric, **scales))
