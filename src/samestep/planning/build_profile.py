"""Makes a profile of what was seen of a training: medians of its steps, bytes, and when its gradients are ready.

steps      0  1  2 │ 3 4 5 6 7 8 9 10 11 12 │ 13 14 15
times              │ medians of these       │
gradients        ▲ │                        │ ▲  ▲  ▲       medians of the last three: as parts of their backward
"""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import UsageError
from samestep.planning.model_profile import CapturedCall, ModelProfile, profile_model, tensors_in, unwrap
from samestep.planning.profile import Gradient, Profile
from samestep.planning.step_trace import FEWEST, LISTENED, PARTS, StepTrace
from samestep.text import plural

Say = Callable[[str], None]


@dataclass(frozen=True)
class Observations:
    script: str  # as people call it
    steps: Sequence[StepTrace]  # all, in their order
    timed: range  # which of them nothing disturbed, if there were enough
    calls: Sequence[tuple[nn.Module, CapturedCall]]  # the models that the script calls, each with its largest call
    optimizers: Sequence[torch.optim.Optimizer]  # that have stepped

    @property
    def chosen(self) -> Sequence[StepTrace]:
        """The steps whose times count: undisturbed ones, unless there are too few; then all but the first."""
        plain = self.steps[self.timed.start : self.timed.stop]
        return plain if len(plain) >= FEWEST else self.steps[1:]

    @property
    def listened(self) -> Sequence[StepTrace]:
        return [step for step in self.steps if step.ready][-LISTENED:]


def profile_of(seen: Observations, say: Say) -> Profile:
    """Returns the profile; `say` is told what goes on."""
    parts, seconds = _medians(seen.chosen)
    names = _names(seen)
    gradients = tuple(_gradients(seen, names, parts["backward"]))
    if not gradients:
        raise UsageError("no gradient was seen: a profile needs a training that calls backward()")
    batch = statistics.mode(step.samples for step in seen.chosen)
    if not batch:
        raise UsageError("cannot determine the batch size: no model was called with a tensor")
    alone = _alone(seen, batch, parts, say)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    models = [unwrap(model) for model, _ in seen.calls]
    buffers = {id(each): each.nbytes for model in models for each in model.buffers()}
    spent: Any = {f"{name}_s": parts[name] for name in PARTS}
    return Profile(
        script=seen.script,
        machine=machine(),
        torch=str(torch.__version__),
        batch=batch,
        steps=len(seen.chosen),
        **spent,
        step_low_s=low,
        step_high_s=high,
        gradients=gradients,
        parameter_bytes=sum(each.nbytes for _, each in names.values()),
        buffer_bytes=sum(buffers.values()),
        optimizer_bytes=sum(each.nbytes for one in seen.optimizers for each in tensors_in(one.state)),
        activation_bytes=max(alone.kept, *(step.kept for step in seen.steps)),
        sizes=alone.sizes,
        layers=alone.layers,
        uncut=alone.uncut,
    )


def _medians(steps: Sequence[StepTrace]) -> tuple[dict[str, float], list[float]]:
    """The medians of the parts, and the seconds of each step, whose median the parts add up to.

    Medians do not add up by themselves, for what is quick in one step is slow in another: what is missing is other
    time, and where they are too much, each is by the same part.
    """
    each, seconds = [step.parts() for step in steps], [step.seconds for step in steps]
    found = {name: statistics.median(one[name] for one in each) for name in PARTS}
    whole, known = statistics.median(seconds), sum(found.values())
    if known > whole:
        return {name: value * whole / known for name, value in found.items()}, seconds
    return found | {"other": found["other"] + whole - known}, seconds


def _names(seen: Observations) -> dict[int, tuple[str, Tensor]]:
    """By id, the name and value of each parameter of the models, and of the optimizers beside; tied ones once."""
    models = [unwrap(model) for model, _ in seen.calls]
    kinds = Counter(type(one).__name__ for one in models)
    found: dict[int, tuple[str, Tensor]] = {}
    for number, model in enumerate(models):
        kind = type(model).__name__
        prefix = "" if len(models) == 1 else f"{kind}." if kinds[kind] == 1 else f"{kind} {number + 1}."
        for name, each in model.named_parameters():
            found.setdefault(id(each), (prefix + name, each))
    for optimizer in seen.optimizers:
        for place, group in enumerate(optimizer.param_groups):
            for number, each in enumerate(group["params"]):
                found.setdefault(id(each), (f"{type(optimizer).__name__} {place}.{number}", each))
    return found


def _gradients(seen: Observations, names: Mapping[int, tuple[str, Tensor]], backward_s: float) -> Iterator[Gradient]:
    """Yields those that came, in their order, with the median part of the backward that was over then."""
    passes = [step.ready_fractions() for step in seen.listened]
    parts = {key: [one[key] for one in passes if key in one] for key in {key for one in passes for key in one}}
    ready = {key: statistics.median(each) for key, each in parts.items() if key in names}
    order = list(passes[-1]) if passes else []
    for key in sorted(ready, key=lambda key: (ready[key], order.index(key) if key in order else len(order))):
        name, parameter = names[key]
        yield Gradient(name, parameter.nbytes, ready[key] * backward_s)


def machine() -> str:
    """Returns what is computed on, in words: the GPU, or the kind of processor and the threads in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, "") or platform.processor() or platform.machine() or "a processor"
    return f"{processor}, {plural(torch.get_num_threads(), 'thread')}"


def _alone(seen: Observations, batch: int, parts: Mapping[str, float], say: Say) -> ModelProfile:
    """What the model does by itself, if there is one."""
    if len(seen.calls) == 1:
        counted = any(step.kept for step in seen.steps)
        return profile_model(*seen.calls[0], batch, parts, say, counted=counted)
    kinds = ", ".join(type(unwrap(model)).__name__ for model, _ in seen.calls)
    several = f"the script calls {len(seen.calls)} models ({kinds})"
    return ModelProfile(uncut=several if seen.calls else "the script calls no model as a whole")
