"""What one process's training is, in plain numbers: measured once, and planned with on any cluster.

    step    │ data │ forward │ backward          │ optimizer │ other │
                               ▲ ▲  ▲   ▲    ▲ ▲                          gradients, each ready at its time

A profile is a file of JSON, so that a training measured where it can run is planned where it cannot, or once and never
again. Its version is that of the layout: a later samestep reads earlier ones, and refuses what it cannot know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samestep import parsing
from samestep.errors import UsageError
from samestep.files import write_atomic
from samestep.parsing import many, read, whole
from samestep.pipelines.layers import Layer

VERSION = 1


@dataclass(frozen=True)
class Gradient:
    name: str  # of the parameter in the model
    nbytes: int
    ready_s: float  # from the start of the backward


@dataclass(frozen=True)
class BatchTime:
    samples: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def _read_layers(value: Any, name: str) -> Mapping[int, tuple[Layer, ...]]:
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {value!r:.40}: give a list of layers for each size of a micro-batch")
    found = {}
    for size, layers in value.items():
        if not size.isdecimal() or len(size) > _DIGITS or not int(size):
            raise UsageError(f"{name} has micro-batches of {size!r:.40} samples: give a whole number above 0")
        found[int(size)] = many(Layer)(layers, f"{name}[{size}]")
    return found


_DIGITS = 18  # of a number of samples


@dataclass(frozen=True, kw_only=True)
class Profile:
    script: str
    machine: str  # on which, in words
    torch: str
    batch: int = field(metadata=read(whole(1)))  # samples of a step
    steps: int = field(metadata=read(whole(1)))
    data_s: float  # seconds that a step waits for samples; these and the following are medians
    forward_s: float
    backward_s: float
    optimizer_s: float  # seconds of the update
    other_s: float  # seconds of all else
    step_low_s: float  # what the faster quarter of the steps took
    step_high_s: float  # what the slower quarter took
    gradients: tuple[Gradient, ...] = field(metadata=read(many(Gradient)))  # in the order in which they are ready
    parameter_bytes: int  # of the model
    buffer_bytes: int  # likewise
    optimizer_bytes: int  # what the optimizer remembers
    activation_bytes: int  # kept from forward to backward, for `batch` samples; where a step has micro-batches, for one
    # forward and backward of batches of several sizes; empty where only the step itself is known
    sizes: tuple[BatchTime, ...] = field(metadata=read(many(BatchTime)), default=())
    # what they cost, by samples of a micro-batch; empty where the model cannot be cut
    layers: Mapping[int, tuple[Layer, ...]] = field(metadata=read(_read_layers), default_factory=dict)
    uncut: str | None = None  # why there are no layers; None where there are
    # the batch is that of each rank: the script deals its data out by torch's DistributedSampler
    per_rank: bool = False

    def __post_init__(self) -> None:
        if not self.step_s:
            raise UsageError("a profile of a step that takes no time: measure it again")
        if not self.gradients:
            raise UsageError("a profile without gradients: nothing was trained")
        samples = [size.samples for size in self.sizes]
        if 0 in samples or len(set(samples)) < len(samples):  # between equal sizes there is no line
            raise UsageError(f"a profile with sizes of {samples} samples: each must be 1 or more, and there once")
        counts = {len(each) for each in self.layers.values()}
        if len(counts) > 1 or 0 in counts:
            raise UsageError("the profile has other layers for each size of a micro-batch, or none: measure it again")

    @property
    def step_s(self) -> float:
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s + self.other_s

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients; frozen parameters have none."""
        return sum(one.nbytes for one in self.gradients)

    def save(self, path: str | Path) -> None:
        """Writes the profile, whole or not at all."""
        write_atomic(Path(path), [json.dumps({"v": VERSION, **asdict(self)}, indent=1), "\n"])


def load(path: str | Path) -> Profile:
    """Returns a profile that was saved; the error says which field is wrong.

    >>> load("nowhere.json")
    Traceback (most recent call last):
    samestep.errors.UsageError: nowhere.json: no such file: samestep plan --save-profile makes one
    """
    given = parsing.parse_json(parsing.read_text(path, "samestep plan --save-profile makes one"), str(path))
    try:
        return parse(given)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def parse(given: Any) -> Profile:
    version = given.get("v") if isinstance(given, dict) else None
    if version != VERSION:
        raise UsageError(f"a profile of version {version}, and this samestep reads {VERSION}: measure it again")
    return parsing.load(Profile, {key: value for key, value in given.items() if key != "v"}, "", "the profile")
