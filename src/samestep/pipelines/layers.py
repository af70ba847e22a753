"""What each layer of a model costs, and what devices and links can do: plain numbers, measured or given.

layer        0        1        2        3            forward and backward: seconds of one micro-batch
             ■ ──a──▶ ■ ──a──▶ ■ ──a──▶ ■            a: bytes that cross a cut there, of all tensors that are
stage        └── 0 ──┘         └── 1 ──┘                alive, once ahead and once, as gradients, back
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.errors import UsageError

__all__: list[str] = []


@dataclass(frozen=True)
class Layer:
    """What one layer costs for one micro-batch.

    Attributes:
        name: in the model.
        forward: seconds.
        inputs: seconds of the backward for the gradients of its inputs.
        weights: likewise of its weights.
        activations: bytes that cross a cut behind it.
        saved: bytes that its forward keeps for its backward.
        parameters: bytes.
        split: seconds more that a backward takes in two halves, apart.
        spread: half of what lies between the quartiles of forward and backward together, where they were measured.
    """

    name: str
    forward: float
    inputs: float
    weights: float = 0.0
    activations: float = 0.0
    saved: float = 0.0
    parameters: float = 0.0
    split: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        for what in ("forward", "inputs", "weights", "activations", "saved", "parameters", "split", "spread"):
            if not getattr(self, what) >= 0:
                raise UsageError(f"layer {self.name}: {what}={getattr(self, what)} is negative, or no number")


@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    Attributes:
        speed: how many times as quick it is as where the layers were measured.
        memory: bytes that it has for the model and what belongs to it.
    """

    speed: float = 1.0
    memory: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf or not self.memory > 0:
            raise UsageError(f"a device of speed {self.speed} and {self.memory} bytes: both must be above 0")


@dataclass(frozen=True)
class Link:
    """What carries activations from a rank to the next, and gradients back; each way by itself.

    Attributes:
        latency: seconds that the smallest message takes.
        bandwidth: bytes a second.
        beside: whether messages travel beside the work of the ranks.
        handling: seconds of its own that a rank takes to send a message, and to take one that has come.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    beside: bool = True
    handling: float = 0.0

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0 or not self.handling >= 0:
            raise UsageError(
                f"a link of {self.latency} s, {self.bandwidth} bytes a second and {self.handling} s of handling: give "
                "0 or more, and more than 0 bytes"
            )

    def seconds(self, size: float) -> float:
        """Returns what a message of `size` bytes takes.

        >>> Link(latency=1e-3, bandwidth=1e9).seconds(1e6)
        0.002
        """
        return self.latency + size / self.bandwidth


def check_chain(layers: Sequence[object], stages: int) -> None:
    """Refuses what cannot be cut into so many stages.

    Raises:
        UsageError: there are fewer layers than stages, or no stage.
    """
    if stages < 1:
        raise UsageError(f"a model cannot be cut into {stages} stages: give 1 or more")
    if len(layers) < stages:
        raise UsageError(f"{stages} stages of {len(layers)} layers: a stage must have one layer at least")
