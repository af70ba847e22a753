"""Makes a profile of what was seen of a training: medians of its steps, and the model by itself on other batches.

    batch       64      32      16      8      4         forward and backward, called again on what it was called with
    layers      64      32      16      8                likewise, where the model can be cut

The loss is not known here: the sum of the outputs serves, and what a loss takes is shared out in proportion, for the
times of the whole batch are made those of the step itself. The model is a copy where one can be made, and what the
script had stays as it was. A forward that stands no other batch, or cannot be cut, is said, and is no error.
"""

from __future__ import annotations

import copy
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError, UsageError
from samestep.pipelines.agreement import check
from samestep.pipelines.chain import chain_of
from samestep.pipelines.layers import Layer
from samestep.pipelines.measure import measure
from samestep.planning.inputs import Inputs, tensors_in
from samestep.planning.moments import PARTS, Moments
from samestep.planning.profile import Gradient, Profile, Size

__all__: list[str] = []

FEWEST = 3  # undisturbed steps; with fewer all but the first count
LISTENED = 3  # steps of which a gradient's median is taken
PASSES = (2, 3, 20)  # that are thrown away, that are measured at least, and at most
LONG_S = 1.0  # of passes of one size, after which the fewest are enough
SMALLEST = 16  # the smallest batch is this part of the whole
PARTS_OF_LAYERS = (1, 2, 4, 8)
_FOLLOWED = 2  # samples with which a forward is followed

Say = Callable[[str], None]


@dataclass(frozen=True)
class Seen:
    """What was seen of a training.

    Attributes:
        script: as people call it.
        steps: all, in their order.
        timed: which of them nothing disturbed, if there were enough.
        calls: the models that the script calls, each with its largest call.
        optimizers: that have stepped.
    """

    script: str
    steps: Sequence[Moments]
    timed: range
    calls: Sequence[tuple[nn.Module, Inputs]]
    optimizers: Sequence[torch.optim.Optimizer]

    @property
    def chosen(self) -> Sequence[Moments]:
        """The steps whose times count: undisturbed ones, unless there are too few."""
        plain = self.steps[self.timed.start : self.timed.stop]
        return plain if len(plain) >= FEWEST else self.steps[1:]

    @property
    def listened(self) -> Sequence[Moments]:
        """The last steps in which gradients were listened to."""
        return [step for step in self.steps if step.ready][-LISTENED:]


def profile_of(seen: Seen, say: Say) -> Profile:
    """Returns the profile; `say` is told what goes on.

    Raises:
        UsageError: no gradient was seen, or it cannot be told how many samples a step has.
    """
    parts, seconds = _medians(seen.chosen)
    names = _names(seen)
    gradients = tuple(_gradients(seen, names, parts["backward"]))
    if not gradients:
        raise UsageError("no gradient was seen: a profile needs a training that calls backward()")
    batch = statistics.mode(step.samples for step in seen.chosen)
    if not batch:
        raise UsageError("it cannot be told how many samples a step has: no model was called with a tensor")
    sizes, layers, uncut = _model_alone(seen, batch, parts, say)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    models = [bare(model) for model, _ in seen.calls]
    buffers = {id(each): each.nbytes for model in models for each in model.buffers()}
    return Profile(
        script=seen.script,
        machine=machine(),
        torch=str(torch.__version__),
        batch=batch,
        steps=len(seen.chosen),
        **{f"{name}_s": parts[name] for name in PARTS},
        step_low_s=low,
        step_high_s=high,
        gradients=gradients,
        parameter_bytes=sum(each.nbytes for _, each in names.values()),
        buffer_bytes=sum(buffers.values()),
        optimizer_bytes=sum(_remembered(one) for one in seen.optimizers),
        activation_bytes=max(step.kept for step in seen.steps),
        sizes=sizes,
        layers=layers,
        uncut=uncut,
    )


def _medians(steps: Sequence[Moments]) -> tuple[dict[str, float], list[float]]:
    """The medians of the parts, made to add up to that of the steps, and the seconds of each step.

    Medians do not add up by themselves: what is quick in one step is slow in another.
    """
    each, seconds = [step.parts() for step in steps], [step.seconds for step in steps]
    found = {name: statistics.median(one[name] for one in each) for name in PARTS}
    scale = statistics.median(seconds) / (sum(found.values()) or 1.0)
    return {name: scale * value for name, value in found.items()}, seconds


def _names(seen: Seen) -> dict[int, tuple[str, Tensor]]:
    """By id, the name and value of each parameter of the models, and of the optimizers beside; tied ones once."""
    models = [bare(model) for model, _ in seen.calls]
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


def _gradients(seen: Seen, names: Mapping[int, tuple[str, Tensor]], backward_s: float) -> Iterator[Gradient]:
    """Yields those that came, in their order, with the median part of the backward that was over then."""
    passes = [step.readiness() for step in seen.listened]
    parts = {key: [one[key] for one in passes if key in one] for key in {key for one in passes for key in one}}
    ready = {key: statistics.median(each) for key, each in parts.items() if key in names}
    order = list(passes[-1]) if passes else []
    for key in sorted(ready, key=lambda key: (ready[key], order.index(key) if key in order else len(order))):
        name, parameter = names[key]
        yield Gradient(name, parameter.nbytes, ready[key] * backward_s)


def _remembered(optimizer: torch.optim.Optimizer) -> int:
    return sum(each.nbytes for state in optimizer.state.values() for each in tensors_in(state))


def bare(model: nn.Module) -> nn.Module:
    """Returns the model inside what wraps it: DistributedDataParallel, a Replica, torch.compile.

    >>> type(bare(nn.DataParallel(nn.Linear(1, 1)))).__name__
    'Linear'
    """
    while type(model).__name__ in {"DistributedDataParallel", "DataParallel", "Replica", "OptimizedModule"}:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def machine() -> str:
    """Returns what is computed on, in words: the GPU, or the kind of processor and the threads in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} {'thread' if threads == 1 else 'threads'}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "a processor"


# --- the model by itself ---------------------------------------------------------------------------

_Alone = tuple[tuple[Size, ...], dict[int, tuple[Layer, ...]], str | None]


def _model_alone(seen: Seen, batch: int, parts: Mapping[str, float], say: Say) -> _Alone:
    if len(seen.calls) != 1:
        kinds = ", ".join(type(bare(model)).__name__ for model, _ in seen.calls)
        several = f"the script calls {len(seen.calls)} models ({kinds})"
        return (), {}, several if seen.calls else "the script calls no model as a whole"
    (model, inputs), own = seen.calls[0], bare(seen.calls[0][0])
    if not inputs.samples:
        return (), {}, f"{type(own).__name__} is called without a tensor"
    with _apart(own, training=model.training) as copied:
        measured, refused = _measured(copied, inputs, say)
        sizes = _scaled(measured, inputs.samples, batch, parts)
        if refused:
            return sizes, {}, refused
        layers, uncut = _layers(copied, inputs, parts["forward"] + parts["backward"], say)
    return sizes, layers, uncut


@contextmanager
def _apart(model: nn.Module, *, training: bool) -> Iterator[nn.Module]:
    """A copy of a model, without hooks in its parameters; where none can be made, the model, put back at the end."""
    try:
        copied = copy.deepcopy(model)
    except Exception:  # noqa: BLE001  (a module may hold anything; and memory may be short)
        copied = model
    buffers = [(each, each.clone()) for each in copied.buffers()]
    gradients = [(each, each.grad) for each in copied.parameters()]
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            yield copied.train(training)
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _measured(model: nn.Module, inputs: Inputs, say: Say) -> tuple[list[Size], str | None]:
    """Forward and backward of the captured call and of smaller ones; and why there are no more, if one fails."""
    sizes: list[Size] = []
    for samples in _halves(inputs.samples):
        say(f"measuring {samples} samples")
        try:
            sizes.append(_timed(model, inputs.first(samples)))
        except Exception as error:  # noqa: BLE001  (anything may come of a forward that meets another batch)
            told = (str(error).splitlines() or [""])[0][:120]
            return sizes, f"it fails by itself with {samples} samples ({type(error).__name__}: {told})"
    return sizes, None


def _halves(samples: int) -> list[int]:
    """The whole, half, a quarter, and so on.

    >>> _halves(64), _halves(5)
    ([64, 32, 16, 8, 4], [5, 2, 1])
    """
    return [samples // 2**n for n in range(SMALLEST.bit_length()) if samples // 2**n]


def _timed(model: nn.Module, inputs: Inputs) -> Size:
    """The medians of several passes."""
    thrown, least, most = PASSES
    found: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(found) < thrown + least or (len(found) < thrown + most and time.perf_counter() - began < LONG_S):
        found.append(_pass(model, inputs))
    forward, backward = zip(*found[thrown:], strict=True)
    return Size(inputs.samples, statistics.median(forward), statistics.median(backward))


def _pass(model: nn.Module, inputs: Inputs) -> tuple[float, float]:
    for parameter in model.parameters():
        parameter.grad = None
    begin = _now()
    with _precision(inputs):
        outputs = [one for one in _outputs(model(*inputs.args, **inputs.kwargs)) if one.requires_grad]
    middle = _now()
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    return middle - begin, _now() - middle


def _outputs(value: Any) -> list[Tensor]:
    """The numbers that a model gives, wherever it puts them."""
    found = list(tensors_in(value)) or list(tensors_in(vars(value) if hasattr(value, "__dict__") else ()))
    return [one for one in found if one.is_floating_point() or one.is_complex()]


def _precision(inputs: Inputs) -> Any:
    return nullcontext() if inputs.autocast is None else torch.autocast(*inputs.autocast)


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def _scaled(sizes: Sequence[Size], called: int, batch: int, parts: Mapping[str, float]) -> tuple[Size, ...]:
    """The sizes with the loss in them: a whole call is its share of the step.

    Args:
        sizes: as measured, a whole call first.
        called: samples of that.
        batch: of a step, which may have several.
        parts: of the step.
    """
    if not sizes:
        return ()
    share, whole = called / batch, sizes[0]
    ahead = parts["forward"] * share / whole.forward_s if whole.forward_s else 1.0
    back = parts["backward"] * share / whole.backward_s if whole.backward_s else 1.0
    found = {one.samples: Size(one.samples, ahead * one.forward_s, back * one.backward_s) for one in sizes}
    found[batch] = Size(batch, parts["forward"], parts["backward"])
    return tuple(found[samples] for samples in sorted(found))


def _layers(
    model: nn.Module, inputs: Inputs, step_s: float, say: Say
) -> tuple[dict[int, tuple[Layer, ...]], str | None]:
    """What layers cost in micro-batches of several sizes; none where the model cannot be cut, and why."""
    given = inputs.by_position(model)
    if isinstance(given, str):
        return {}, given
    say("measuring layers")
    found: dict[int, tuple[Layer, ...]] = {}
    try:
        few = [each[:_FOLLOWED] for each in given]
        chain = chain_of(model, few)
        if len(chain.layers) < 2:
            return {}, _clause((chain.obstacles or ["it is a single layer"])[0])
        if chain.recipe is not None:
            check(model, [layer for _, layer in chain.layers], few)
        for samples in [inputs.samples // part for part in PARTS_OF_LAYERS if inputs.samples // part]:
            say(f"measuring layers, {samples} samples")
            with _precision(inputs):
                cut = [each[:samples].clone() for each in given]
                found[samples] = tuple(measure(chain.layers, cut, _sum, _repeats(step_s)))
    except ModelError as error:
        return {}, _clause(str(error))
    except Exception as error:  # noqa: BLE001  (likewise: a layer may stand no other batch, or no autograd by itself)
        return {}, f"its layers cannot be run one by one ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
    return found, None


def _sum(outputs: Any) -> Tensor:
    """What stands for the loss."""
    return torch.stack([one.sum() for one in _outputs(outputs) if one.requires_grad]).sum()


def _repeats(step_s: float) -> int:
    """Passes for a median: fewer where each takes long."""
    return 10 if step_s < 0.02 else 5 if step_s < 0.2 else 2 if step_s < 2 else 1


def _clause(message: str) -> str:
    """An error without the advice behind its last colon, which is for whoever builds a pipeline.

    >>> _clause("layer 1 has a BatchNorm2d: use GroupNorm or LayerNorm in a pipeline")
    'layer 1 has a BatchNorm2d'
    """
    return message.rpartition(": ")[0] or message
