"""A model by itself, after the script's last step: on smaller batches, and layer by layer.

    batch       64      32      16      8      4         forward and backward, called again on what it was called with
    layers      64      32      16      8                likewise, where the model can be cut

The loss is not known here: the sum of the outputs serves, and what a loss takes is shared out in proportion, for the
times of the whole batch are made those of the step itself. The model is a copy where one can be made, and what the
script had stays as it was. A forward that stands no other batch, or cannot be cut, is said, and is no error.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.pipelines.layers import Layer
from samestep.pipelines.model_chain import build_chain
from samestep.pipelines.profiler import profile_layers
from samestep.pipelines.splitting import check_equivalence
from samestep.planning.inputs import Inputs, tensors_in
from samestep.planning.kept import Kept
from samestep.planning.profile import Size
from samestep.runtime import rng

__all__: list[str] = []

THROWN, LEAST, MOST = 2, 3, 20  # passes of each size: to warm up, and that a median is taken of
LONG_S = 2.0  # of passes of all sizes, after which the fewest are enough
SMALLEST = 16  # the smallest batch is this part of the whole
PARTS_OF_LAYERS = (1, 2, 4, 8)
_FOLLOWED = 2  # samples with which a forward is followed

Say = Callable[[str], None]


@dataclass
class Alone:
    """What a model does by itself, as in a profile; `kept` is 0 where the script's own steps have told."""

    sizes: tuple[Size, ...] = ()
    layers: Mapping[int, tuple[Layer, ...]] = field(default_factory=dict)
    uncut: str | None = None
    kept: int = 0


def by_itself(
    model: nn.Module, inputs: Inputs, batch: int, parts: Mapping[str, float], say: Say, *, counted: bool
) -> Alone:
    """Returns what a model does by itself.

    Args:
        model: as the script calls it.
        inputs: of one call; of a step with several micro-batches, of the largest.
        batch: samples of a step.
        parts: seconds of the step's "forward" and "backward".
        say: is told what goes on.
        counted: whether the script's own steps have told what is kept for the backward.
    """
    own, found = bare(model), Alone()
    if not inputs.samples:
        return Alone(uncut=f"{type(own).__name__} is called without a tensor")
    with _apart(own, training=inputs.training) as copied:
        measured, found.uncut = _measured(copied, inputs, say)
        found.sizes = _scaled(measured, inputs.samples, batch, parts)
        kinds = {type(each).__name__ for each in model.modules()}
        hidden = "OptimizedModule" in kinds  # which keeps things where hooks do not see them
        if measured and (hidden or not counted):
            found.kept = _kept(copied, inputs)
        if measured:
            found.layers, found.uncut = _layers(copied, inputs, parts["forward"] + parts["backward"], say)
    return found


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


def _kept(model: nn.Module, inputs: Inputs) -> int:
    """Bytes that the model's own forward keeps; without the loss's."""
    with _precision(inputs), Kept([*model.parameters(), *model.buffers()]) as kept:
        model(*inputs.args, **inputs.kwargs)
        return kept.taken()


@contextmanager
def _apart(model: nn.Module, *, training: bool) -> Iterator[nn.Module]:
    """A copy of a model, without hooks in its parameters; where none can be made, the model, put back at the end."""
    try:
        copied = copy.deepcopy(model)
    except Exception:  # noqa: BLE001  (a module may hold anything; and memory may be short)
        copied = model
    buffers = [(each, each.clone()) for each in copied.buffers()]
    gradients = [(each, each.grad) for each in copied.parameters()]
    with rng.keep_generators(), torch.enable_grad():
        try:
            yield copied.train(training)
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _measured(model: nn.Module, inputs: Inputs, say: Say) -> tuple[list[Size], str | None]:
    """Forward and backward of the captured call and of smaller ones; and why there are no more, if one fails.

    All sizes take turns, so that a machine that is slower for a while is so for each of them.
    """
    calls: list[Inputs] = []
    refused = None
    for samples in _halves(inputs.samples):
        say(f"measuring {samples} samples")
        try:
            calls.append(_warmed_up(model, inputs.first(samples)))
        except Exception as error:  # noqa: BLE001  (anything may come of a forward that meets another batch)
            refused = f"it fails by itself with {samples} samples ({_short(error)})"
            break
    return [_size(call, passes) for call, passes in zip(calls, _in_turn(model, calls), strict=True)], refused


def _warmed_up(model: nn.Module, call: Inputs) -> Inputs:
    for _ in range(THROWN):
        _pass(model, call)
    return call


def _in_turn(model: nn.Module, calls: Sequence[Inputs]) -> list[list[tuple[float, float]]]:
    """By call, the seconds of forward and backward of each of its passes."""
    found: list[list[tuple[float, float]]] = [[] for _ in calls]
    began = time.perf_counter()
    for number in range(MOST):
        if number >= LEAST and time.perf_counter() - began > LONG_S:
            break
        for call, passes in zip(calls, found, strict=True):
            passes.append(_pass(model, call))
    return found


def _size(call: Inputs, passes: Sequence[tuple[float, float]]) -> Size:
    forward, backward = zip(*passes, strict=True)
    return Size(call.samples, statistics.median(forward), statistics.median(backward))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _halves(samples: int) -> list[int]:
    """The whole, half, a quarter, and so on.

    >>> _halves(64), _halves(5)
    ([64, 32, 16, 8, 4], [5, 2, 1])
    """
    return [samples // 2**n for n in range(SMALLEST.bit_length()) if samples // 2**n]


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
        chain = build_chain(model, few)
        if len(chain.layers) < 2:
            return {}, _clause((chain.obstacles or ["it is a single layer"])[0])
        if chain.digest:
            check_equivalence(model, chain.layers, few)
        for samples in [inputs.samples // part for part in PARTS_OF_LAYERS if inputs.samples // part]:
            say(f"measuring layers, {samples} samples")
            with _precision(inputs):
                cut = [each[:samples].clone() for each in given]
                found[samples] = tuple(profile_layers(chain.layers, cut, _sum, _repeats(step_s)))
    except ModelError as error:
        return {}, _clause(str(error))
    except Exception as error:  # noqa: BLE001  (likewise: a layer may stand no other batch, or no autograd by itself)
        if found:
            return found, None
        return {}, f"its layers cannot be run one by one ({_short(error)})"
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
