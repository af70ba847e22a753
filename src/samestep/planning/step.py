"""A step that is predicted: how the ranks are used, what it takes, and what that goes into.

replicas                     every rank has the whole model and a part of the batch
  rank   0  1  2  3

replicas of stages           ranks 0 and 1 are one replica, 2 and 3 another; 0 and 2 sum their gradients
  stage  0  1  0  1

seconds    data │ work │ smaller batches │ imbalance │ bubble │ messages │ latency │ transfer │ optimizer │ other
           └ the parts add up to the step; each is what the step would be faster by without it, one after another
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from samestep.errors import UsageError
from samestep.planning.profile import Profile

MESSAGE_ERROR = 0.15  # of predicted messages, as measured over limited links: docs/plan.md


@dataclass(frozen=True)
class ParallelLayout:
    replicas: int  # that sum their gradients
    stages: int = 1  # of each replica, a rank each
    micro_batches: int = 1  # that a replica's batch is cut into; 1 without stages
    schedule: str = "1f1b"  # in which order the stages work

    def __post_init__(self) -> None:
        if min(self.replicas, self.stages, self.micro_batches) < 1:
            raise UsageError(
                f"{self.replicas} replicas of {self.stages} stages with {self.micro_batches} micro-batches: give 1 or "
                "more of each"
            )

    @property
    def ranks(self) -> int:
        return self.replicas * self.stages

    def __str__(self) -> str:
        if self.ranks == 1:
            return "1 process"
        if self.stages == 1:
            return f"{self.replicas} replicas"
        stages = f"{self.stages} stages, {self.micro_batches} micro-batches, {self.schedule}"
        return stages if self.replicas == 1 else f"{self.replicas} replicas of {stages}"


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """What a step goes into, in seconds."""

    data: float = 0.0  # waiting for samples
    work: float = 0.0  # forward and backward of one rank's share, if nothing were lost by dividing it
    smaller: float = 0.0  # what kernels lose on smaller batches
    imbalance: float = 0.0  # of batches that do not divide evenly, and of stages that are not alike
    bubble: float = 0.0  # of the schedule, if all stages were alike
    messages: float = 0.0  # between stages
    latency: float = 0.0  # of the all-reduces, as far as it is not hidden behind the backward
    transfer: float = 0.0  # of their bytes, likewise
    optimizer: float = 0.0
    other: float = 0.0  # what the script does besides

    @cached_property
    def seconds(self) -> float:
        return sum(self.shares().values())

    def shares(self) -> dict[str, float]:
        """Returns them by name.

        >>> StepBreakdown(work=2.0, latency=1.0).seconds
        3.0
        """
        return asdict(self)


WORDS = {
    "data": "waiting for data",
    "work": "computing",
    "smaller": "kernels on smaller batches",
    "imbalance": "imbalance",
    "bubble": "the pipeline's bubble",
    "messages": "messages between stages",
    "latency": "latency of the all-reduce",
    "transfer": "bandwidth of the all-reduce",
    "optimizer": "the optimizer",
    "other": "what the script does besides",
}


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    layout: ParallelLayout  # how the ranks are used
    parts: StepBreakdown  # what it goes into
    low: float  # seconds that it hardly undercuts
    high: float  # seconds that it hardly exceeds
    samples: int  # of the whole step
    memory: float  # bytes on the fullest device
    algorithm: str = ""  # of the all-reduce; empty where there is none
    buckets: tuple[int, ...] = ()  # bytes of each, in the order in which they are summed
    hidden: float = 1.0  # the part of the all-reduce that runs beside the backward; 1 where there is none
    ends: tuple[int, ...] = ()  # by stage, the layer behind its last

    @property
    def seconds(self) -> float:
        return self.parts.seconds

    @property
    def rate(self) -> float:
        return self.samples / self.seconds if self.seconds else float("inf")

    def bottleneck(self) -> str:
        """Returns the part beside the work that takes longest, or the work."""
        shares = self.parts.shares()
        work = shares.pop("work")
        name = max(shares, key=lambda one: shares[one])
        return name if shares[name] > 0.25 * work else "work"

    def as_json(self) -> dict[str, Any]:
        numbers = {name: value for name, value in asdict(self).items() if name not in ("layout", "parts")}
        return {
            "way": asdict(self.layout),
            "seconds": self.seconds,
            "parts": self.parts.shares(),
            "limit": self.bottleneck(),
            **numbers,
        }


def predicted(
    profile: Profile, layout: ParallelLayout, parts: StepBreakdown, samples: int, memory: float, **more: Any
) -> PredictedStep:
    """Returns a step that goes into these parts, with the interval in which it is expected."""
    low, high = interval(profile, parts, layout.ranks)
    return PredictedStep(layout=layout, parts=parts, low=low, high=high, samples=samples, memory=memory, **more)


def interval(profile: Profile, parts: StepBreakdown, ranks: int) -> tuple[float, float]:
    """Returns within which seconds a step is expected: quartiles of the profile, and the model's error on messages.

    The higher end counts too that a step waits for the slowest of its ranks: of N normal times the largest lies about
    sqrt(2 ln N) deviations above the mean.
    """
    messages = parts.latency + parts.transfer + parts.messages
    error, own = MESSAGE_ERROR * messages, parts.seconds - messages
    middle = (profile.step_low_s + profile.step_high_s) / 2
    half = (profile.step_high_s - profile.step_low_s) / 2 / middle if middle else 0.0
    slowest = max(1.0, math.sqrt(2 * math.log(max(1, ranks))) / 0.6745)  # a quartile is 0.6745 deviations
    return max(0.0, parts.seconds - error - half * own), parts.seconds + error + half * slowest * own
