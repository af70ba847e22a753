"""What each layer of a model costs, and what devices and links can do: plain numbers, measured or given.

layer        0        1        2        3            forward and backward: seconds of one micro-batch
             ■ ──a──▶ ■ ──a──▶ ■ ──a──▶ ■            a: bytes that cross a cut there, of all live tensors, once
stage        └── 0 ──┘         └── 1 ──┘                forward, and once, as gradients, back
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from samestep.errors import UsageError
from samestep.schedule.schedule import Schedule


@dataclass(frozen=True)
class Layer:
    """What one layer costs for one micro-batch."""

    name: str  # in the model
    forward: float  # seconds
    inputs: float  # seconds of the backward for the gradients of its inputs
    weights: float = 0.0  # seconds of the backward for those of its weights
    activations: float = 0.0  # bytes that cross a cut behind it
    saved: float = 0.0  # bytes that its forward keeps for its backward
    parameters: float = 0.0  # bytes
    split: float = 0.0  # seconds more that a backward takes in two parts
    # half of the range between the quartiles of forward and backward together, where they were measured
    spread: float = 0.0

    def __post_init__(self) -> None:
        for what in _COSTS:
            if not getattr(self, what) >= 0:
                raise UsageError(f"layer {self.name}: {what}={getattr(self, what)} is negative, or no number")


_COSTS = [each.name for each in fields(Layer) if each.name != "name"]


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
    """What carries activations from a rank to the next, and gradients back; each direction by itself.

    Attributes:
        latency: seconds that the smallest message takes.
        bandwidth: bytes a second.
        overlap: whether messages travel while the ranks work.
        overhead: seconds that a rank itself takes to send a message, and to receive one that has come.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    overlap: bool = True
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0 or not self.overhead >= 0:
            raise UsageError(
                f"a link of {self.latency} s, {self.bandwidth} bytes a second and {self.overhead} s of overhead: give "
                "0 or more, and more than 0 bytes"
            )

    def seconds(self, size: float) -> float:
        """Returns what a message of `size` bytes takes.

        >>> Link(latency=1e-3, bandwidth=1e9).seconds(1e6)
        0.002
        """
        return self.latency + size / self.bandwidth


def check_num_stages(layers: Sequence[object], stages: int) -> None:
    """Refuses a number of stages that layers cannot be cut into."""
    if stages < 1:
        raise UsageError(f"a model cannot be cut into {stages} stages: give 1 or more")
    if len(layers) < stages:
        raise UsageError(f"{stages} stages of {len(layers)} layers: a stage must have one layer at least")


def with_split_backwards(layers: Sequence[Layer], schedule: Schedule) -> list[Layer]:
    """Returns what layers cost under a schedule: backwards in two parts may take more."""
    if not schedule.split_backwards:
        return list(layers)
    return [replace(each, weights=each.weights + each.split) for each in layers]


def interpolate(sizes: Mapping[int, Sequence[Layer]], samples: float) -> list[Layer]:
    """Returns what layers cost for micro-batches of any size, from sizes that were measured: t(b) = alpha + beta b.

    Alpha is what kernels take to start, beta what a sample takes. Small sizes count as much as large ones: errors are
    relative to the size.

    `sizes` has the layers as measured, by the samples of a micro-batch.

    Example:
        >>> two = {10: [Layer("a", forward=3.0, inputs=1.0)], 20: [Layer("a", forward=5.0, inputs=1.0)]}
        >>> round(interpolate(two, 40)[0].forward, 6)
        9.0
    """
    if samples in sizes:
        return list(sizes[int(samples)])
    if len(sizes) < 2:
        raise UsageError(
            f"layers were measured for micro-batches of {next(iter(sizes))} samples alone, and {samples:g} are asked "
            "for: plan with micro_batches='auto'"
        )
    known = np.array(sorted(sizes), dtype=float)
    found = []
    for place, layer in enumerate(sizes[int(known[0])]):
        costs = {}
        for name in _COSTS:
            measured = [getattr(sizes[int(size)][place], name) for size in known]
            beta, alpha = np.polyfit(known, measured, 1, w=1 / known)
            costs[name] = max(0.0, float(alpha + beta * samples))
        found.append(Layer(layer.name, **costs))
    return found
