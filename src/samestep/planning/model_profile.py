"""A model by itself, after the script's last step: on smaller batches, and layer by layer.

    batch       64      32      16      8      4         forward and backward, called again on what it was called with
    layers      64      32      16      8                likewise, where the model can be cut

The loss is not known here: the sum of the outputs serves, and what a loss takes is shared out in proportion, for the
times of the whole batch are made those of the step itself. The model is a copy where one can be made, and the script's
own stays as it was. Where a forward fails on other batches, or cannot be cut, the profile says why.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.pipelines.layers import Layer
from samestep.pipelines.model_chain import build_chain
from samestep.pipelines.profiler import profile_layers
from samestep.pipelines.splitting import check_equivalence
from samestep.planning.profile import BatchTime
from samestep.runtime import rng
from samestep.verification.recording.containers import named_tensors

THROWN, LEAST, MOST = 2, 3, 20  # passes of each size: to warm up, and that a median is taken of
LONG_S = 2.0  # of passes of all sizes, after which LEAST are enough
SMALLEST = 16  # the smallest batch is this part of the whole
PARTS_OF_LAYERS = (1, 2, 4, 8)
_FOLLOWED = 2  # samples with which a forward is followed

Say = Callable[[str], None]


@dataclass
class ModelProfile:
    """What a model does by itself, as in a profile; `kept` is 0 where the script's own steps have told."""

    sizes: tuple[BatchTime, ...] = ()
    layers: Mapping[int, tuple[Layer, ...]] = field(default_factory=dict)
    uncut: str | None = None
    kept: int = 0


def profile_model(
    model: nn.Module, inputs: CapturedCall, batch: int, parts: Mapping[str, float], say: Say, *, counted: bool
) -> ModelProfile:
    """Returns what a model does by itself.

    Args:
        model: as the script calls it.
        inputs: of one call; of a step with several micro-batches, of the largest.
        batch: samples of a step.
        parts: seconds of the step's "forward" and "backward".
        say: is told what goes on.
        counted: whether the script's own steps have told what is kept for the backward.
    """
    own, found = unwrap(model), ModelProfile()
    if not inputs.samples:
        return ModelProfile(uncut=f"{type(own).__name__} is called without a tensor")
    with _copied(own, training=inputs.training) as copied:
        measured, found.uncut = _measured(copied, inputs, say)
        found.sizes = _scaled(measured, inputs.samples, batch, parts)
        kinds = {type(each).__name__ for each in model.modules()}
        hidden = "OptimizedModule" in kinds  # which keeps things where hooks do not see them
        if measured and (hidden or not counted):
            with _precision(inputs), SavedTensorBytes([*copied.parameters(), *copied.buffers()]) as kept:
                copied(*inputs.args, **inputs.kwargs)
                found.kept = kept.take()  # without the loss's
        if measured:
            found.layers, found.uncut = _layers(copied, inputs, parts["forward"] + parts["backward"], say)
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the model inside what wraps it: DistributedDataParallel, a Replica, torch.compile.

    >>> type(unwrap(nn.DataParallel(nn.Linear(1, 1)))).__name__
    'Linear'
    """
    while type(model).__name__ in {"DistributedDataParallel", "DataParallel", "Replica", "OptimizedModule"}:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


@contextmanager
def _copied(model: nn.Module, *, training: bool) -> Iterator[nn.Module]:
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


def _measured(model: nn.Module, inputs: CapturedCall, say: Say) -> tuple[list[BatchTime], str | None]:
    """Forward and backward of the captured call and of smaller ones; and why there are no more, if one fails.

    All sizes take turns, so that a machine that is slower for a while is so for each of them.
    """
    calls: list[CapturedCall] = []
    refused = None
    for samples in _halves(inputs.samples):
        say(f"measuring {samples} samples")
        try:
            call = inputs.first(samples)
            for _ in range(THROWN):
                _pass(model, call)
            calls.append(call)
        except Exception as error:  # noqa: BLE001  (anything may come of a forward that meets another batch)
            refused = f"it fails by itself with {samples} samples ({_short(error)})"
            break
    found = []
    for call, passes in zip(calls, _in_turn(model, calls), strict=True):
        forward, backward = (statistics.median(seconds) for seconds in zip(*passes, strict=True))
        found.append(BatchTime(call.samples, forward, backward))
    return found, refused


def _in_turn(model: nn.Module, calls: Sequence[CapturedCall]) -> list[list[tuple[float, float]]]:
    """By call, the seconds of forward and backward of each of its passes."""
    found: list[list[tuple[float, float]]] = [[] for _ in calls]
    began = time.perf_counter()
    for number in range(MOST):
        if number >= LEAST and time.perf_counter() - began > LONG_S:
            break
        for call, passes in zip(calls, found, strict=True):
            passes.append(_pass(model, call))
    return found


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _halves(samples: int) -> list[int]:
    """The whole, half, a quarter, and so on.

    >>> _halves(64), _halves(5)
    ([64, 32, 16, 8, 4], [5, 2, 1])
    """
    return [samples // 2**n for n in range(SMALLEST.bit_length()) if samples // 2**n]


def _pass(model: nn.Module, inputs: CapturedCall) -> tuple[float, float]:
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


def _precision(inputs: CapturedCall) -> Any:
    return nullcontext() if inputs.autocast is None else torch.autocast(*inputs.autocast)


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def _scaled(sizes: Sequence[BatchTime], called: int, batch: int, parts: Mapping[str, float]) -> tuple[BatchTime, ...]:
    """The sizes, a whole call of `called` samples first, with the loss in them: that call is its share of the step."""
    if not sizes:
        return ()
    share, whole = called / batch, sizes[0]
    forward = parts["forward"] * share / whole.forward_s if whole.forward_s else 1.0
    backward = parts["backward"] * share / whole.backward_s if whole.backward_s else 1.0
    found = {one.samples: BatchTime(one.samples, forward * one.forward_s, backward * one.backward_s) for one in sizes}
    found[batch] = BatchTime(batch, parts["forward"], parts["backward"])
    return tuple(found[samples] for samples in sorted(found))


def _layers(
    model: nn.Module, inputs: CapturedCall, step_s: float, say: Say
) -> tuple[dict[int, tuple[Layer, ...]], str | None]:
    """What layers cost in micro-batches of several sizes; none where the model cannot be cut, and why."""
    given = inputs.positional(model)
    if isinstance(given, str):
        return {}, given
    say("measuring layers")
    repeats = 10 if step_s < 0.02 else 5 if step_s < 0.2 else 2 if step_s < 2 else 1  # fewer where each takes long
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
                found[samples] = tuple(profile_layers(chain.layers, cut, _sum, repeats))
    except ModelError as error:
        return {}, _clause(str(error))
    except Exception as error:  # noqa: BLE001  (likewise: a layer may stand no other batch, or no autograd by itself)
        if found:
            return found, None
        return {}, f"its layers cannot be run one by one ({_short(error)})"
    return found, None


def _sum(outputs: Any) -> Tensor:
    return torch.stack([one.sum() for one in _outputs(outputs) if one.requires_grad]).sum()


def _clause(message: str) -> str:
    """An error without the advice behind its last colon, which is for whoever builds a pipeline.

    >>> _clause("layer 1 has a BatchNorm2d: use GroupNorm or LayerNorm in a pipeline")
    'layer 1 has a BatchNorm2d'
    """
    return message.rpartition(": ")[0] or message


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples and mappings, in their order."""
    return (tensor for _, tensor in named_tensors(value))


def batch_size_of(value: Any) -> int:
    """Returns dim 0 of the first tensor that has one; 0 without any.

    >>> batch_size_of(({"ids": torch.zeros(8, 3)}, torch.zeros(5)))
    8
    """
    return next((int(one.shape[0]) for one in tensors_in(value) if one.dim()), 0)


@dataclass(frozen=True)
class CapturedCall:
    args: tuple[Any, ...]  # by position; tensors are copies without gradients
    kwargs: dict[str, Any]  # by name, likewise
    samples: int  # that it was called with
    # precision that it ran in, by kind of device; None where it ran in its own
    autocast: tuple[str, torch.dtype] | None
    training: bool = True  # the model was in training mode, which an evaluation behind the last step changes

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool = True) -> CapturedCall:
        """Keeps a call that is about to be made."""
        copied, named = _changed((args, dict(kwargs)), lambda tensor: tensor.detach().clone())
        first = next(tensors_in((args, kwargs)), None)
        kind = "cpu" if first is None else first.device.type
        on = torch.is_autocast_enabled(kind)
        autocast = (kind, torch.get_autocast_dtype(kind)) if on else None
        return cls(copied, named, batch_size_of((args, kwargs)), autocast, training)

    def first(self, samples: int) -> CapturedCall:
        """Returns a call on the first samples: of all tensors that have one row each.

        >>> call = CapturedCall.of((torch.zeros(8, 3), torch.zeros(3, 3)), {"scale": 2})
        >>> [list(one.shape) for one in call.first(2).args]
        [[2, 3], [3, 3]]
        """

        def cut(tensor: Tensor) -> Tensor:
            return tensor[:samples] if tensor.dim() and tensor.shape[0] == self.samples else tensor

        args, kwargs = _changed((self.args, self.kwargs), cut)
        if batch_size_of((args, kwargs)) != samples:
            raise ModelError("what it is called with cannot be cut into fewer samples")
        return CapturedCall(args, kwargs, samples, self.autocast, self.training)

    def positional(self, model: nn.Module) -> list[Tensor] | str:
        """Returns the tensors that the forward takes, all by position; else why they cannot be given so."""
        try:
            bound = inspect.signature(model.forward).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            return "its forward does not say what it takes"
        if bound.kwargs:
            return f"its forward takes {next(iter(bound.kwargs))} by name alone"
        given = list(bound.args)
        while given and given[-1] is None:
            given.pop()
        if not given or not all(isinstance(one, Tensor) for one in given):
            return "its forward takes something else than tensors"
        if not all(one.dim() and one.shape[0] == self.samples for one in given):
            return "its forward takes a tensor that has no row for each sample"
        return given


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested lists, tuples and mappings with other tensors; everything else is as it was."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (dict, OrderedDict):  # a class of the user's may be made otherwise
        return type(value)((key, _changed(one, change)) for key, one in value.items())
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    if isinstance(value, tuple):
        found = [_changed(one, change) for one in value]
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    return value


class SavedTensorBytes:
    """Counts the bytes that autograd saves from a forward for its backward, while it is entered, in its thread.

        layer        saves                                counted
        Linear       its input, its weight                the input; the weight is a parameter
        ReLU         its output, which is also the        once
        next Linear  input of the next layer

    What is one storage counts once. Of a storage that is larger than what is kept of it (a batch that was cut out of a
    whole data set) only what is kept counts. Tensors that are there anyway, parameters and buffers, do not count.

    >>> layer, x = torch.nn.Linear(4, 8), torch.ones(2, 4)
    >>> with SavedTensorBytes(layer.parameters()) as kept:
    ...     _ = layer(x)
    >>> kept.take()
    32
    """

    def __init__(self, without: Iterable[Tensor]) -> None:
        self._without = {one.untyped_storage().data_ptr() for one in without if one.layout == torch.strided}
        self._found: dict[int, tuple[int, set[tuple[int, int]]]] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def take(self) -> int:
        """Returns the bytes so far, and begins anew."""
        found, self._found = self._found, {}
        return int(sum(min(whole, sum(size for _, size in parts)) for whole, parts in found.values()))

    def _pack(self, tensor: Tensor) -> Tensor:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided  # a compiler has others
        if plain and not tensor.is_meta and not torch.compiler.is_compiling():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._without:
                _, parts = self._found.setdefault(storage.data_ptr(), (storage.nbytes(), set()))
                parts.add((int(tensor.storage_offset()), tensor.nbytes))
        return tensor
