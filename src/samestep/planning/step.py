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

__all__: list[str] = []

MESSAGE_ERROR = 0.15  # of predicted messages, as measured over limited links: docs/plan.md


@dataclass(frozen=True)
class ParallelLayout:
    """How ranks are used.

    Attributes:
        replicas: that sum their gradients.
        stages: of each replica, a rank each.
        micro_batches: that a replica's batch is cut into; 1 without stages.
        schedule: in which order the stages work.

    Raises:
        UsageError: a number below 1.
    """

    replicas: int
    stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if min(self.replicas, self.stages, self.micro_batches) < 1:
            raise UsageError(
                f"{self.replicas} replicas of {self.stages} stages with {self.micro_batches} micro-batches: give 1 or "
                "more of each"
            )

    @property
    def ranks(self) -> int:
        """How many are used."""
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
    """What a step goes into, in seconds.

    Attributes:
        data: waiting for samples.
        work: forward and backward of one rank's share, if nothing were lost by dividing it.
        smaller: what kernels lose on smaller batches.
        imbalance: of batches that do not divide evenly, and of stages that are not alike.
        bubble: of the schedule, if all stages were alike.
        messages: between stages.
        latency: of the all-reduces, as far as it is not hidden behind the backward.
        transfer: of their bytes, likewise.
        optimizer: the update.
        other: what the script does besides.
    """

    data: float = 0.0
    work: float = 0.0
    smaller: float = 0.0
    imbalance: float = 0.0
    bubble: float = 0.0
    messages: float = 0.0
    latency: float = 0.0
    transfer: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0

    @cached_property
    def seconds(self) -> float:
        """The whole."""
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
    """A step that is predicted.

    Attributes:
        layout: how the ranks are used.
        parts: what it goes into.
        low: seconds that it hardly undercuts.
        high: seconds that it hardly exceeds.
        samples: of the whole step.
        memory: bytes on the fullest device.
        algorithm: of the all-reduce; empty where there is none.
        buckets: bytes of each, in the order in which they are summed.
        hidden: the part of the all-reduce that runs beside the backward; 1 where there is none.
        ends: by stage, the layer behind its last.
    """

    layout: ParallelLayout
    parts: StepBreakdown
    low: float
    high: float
    samples: int
    memory: float
    algorithm: str = ""
    buckets: tuple[int, ...] = ()
    hidden: float = 1.0
    ends: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """What it takes."""
        return self.parts.seconds

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds else float("inf")

    def bottleneck(self) -> str:
        """Returns the part beside the work that takes longest, or the work."""
        shares = self.parts.shares()
        work = shares.pop("work")
        name = max(shares, key=lambda one: shares[one])
        return name if shares[name] > 0.25 * work else "work"

    def as_json(self) -> dict[str, Any]:
        """Returns every number."""
        numbers = {name: value for name, value in asdict(self).items() if name not in ("layout", "parts")}
        return {
            "way": asdict(self.layout),
            "seconds": self.seconds,
            "parts": self.parts.shares(),
            "limit": self.bottleneck(),
            **numbers,
        }


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
