"""What the layers of a model cost, measured while the whole model runs: forward, both parts of backward, and bytes.

    x ─●─ layer 0 ─●─ layer 1 ─●─ layer 2 ─●─ loss        ●: notes when values, and gradients, pass
      ◀●◀──────────●◀──────────●◀──────────●◀

So caches, allocator and fusion are those of a step. The loss belongs to the last layer. (torchgpipe copies each layer,
runs it alone and waits for the device after each; DeepSpeed counts parameters.) The first layer has no gradient to pass
on, and a cheaper backward. What a backward takes for inputs alone is measured with parameters that require no gradient,
and what both parts apart take more than a whole one by doing both, layer by layer.

The median of several passes is taken, after some to warm up. Layers of one signature, with parameters and inputs of the
same shapes, share the median of all of them: their times differ by noise.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import UsageError
from samestep.pipelines.chain_layer import ChainLayer, as_argument, preserve_state
from samestep.pipelines.layers import Layer
from samestep.pipelines.split_backward import SplitBackward
from samestep.runtime import rng

WARM_UP, REPEATS = 3, 10  # passes
NUM_PARTS = 3  # each with as many passes: whole, for inputs alone, in two parts


@dataclass
class _Clock:
    """When values and gradients have passed each place, in seconds."""

    device: torch.device
    forward: dict[int, float] = field(default_factory=dict)
    backward: dict[int, float] = field(default_factory=dict)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _Timestamp(torch.autograd.Function):
    """Changes nothing, and notes when it is passed, in each direction."""

    @staticmethod
    def forward(ctx: Any, clock: _Clock, place: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.clock, ctx.place = clock, place
        clock.forward[place] = clock.now()
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.backward[ctx.place] = ctx.clock.now()
        return None, None, *gradients


def profile_layers(
    layers: Sequence[ChainLayer],
    sample: Sequence[Tensor],
    loss_of: Callable[[Any], Tensor],
    repeats: int = REPEATS,
    on_pass: Callable[[], None] = lambda: None,
) -> list[Layer]:
    """Returns what each layer costs for a micro-batch like `sample`; parameters and their gradients stay as they are.

    Args:
        layers: called one after another.
        sample: a micro-batch's inputs, on the layers' device.
        loss_of: makes a scalar of the last layer's outputs.
        repeats: passes whose median is taken.
        on_pass: called after each of NUM_PARTS * (WARM_UP + repeats) passes.

    Raises:
        UsageError: there are no passes to take the median of.

    Example:
        >>> from samestep.pipelines.model_chain import build_chain
        >>> chain = build_chain(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
        >>> [layer.activations for layer in profile_layers(chain.layers, [torch.ones(2, 4)], torch.sum, 1)]
        [64.0, 64.0]
    """
    if repeats < 1:
        raise UsageError(f"the median of {repeats} passes is to be taken: give 1 or more")

    def passes(one: Callable[[], Any]) -> list[Any]:
        found = []
        for _ in range(WARM_UP + repeats):
            found.append(one())
            on_pass()
        return found[WARM_UP:]

    parameters = [each for layer in layers for each in layer.parameters()]
    with preserve_state(*layers), rng.keep_generators():
        for parameter in parameters:
            parameter.grad = None
        whole = passes(lambda: _time_pass(layers, sample, loss_of))
        with _frozen(parameters):
            inputs_only = passes(lambda: _time_pass(layers, sample, loss_of, inputs_only=True)[1])
        split = passes(lambda: _time_split(layers, sample))
        saved, sizes, same_as = _measure_bytes(layers, sample)
    forward = _pool([one for one, _ in whole], same_as, median)
    backward = _pool([one for _, one in whole], same_as, median)
    spread = _pool([[sum(both) for both in zip(*one, strict=True)] for one in whole], same_as, _half_range)
    inputs = _pool(inputs_only, same_as, median)
    more = _pool(split, same_as, median)
    inputs[0] = 0.0  # nothing needs the gradients of a batch
    return [
        Layer(
            layer.name,
            forward[number],
            min(inputs[number], backward[number]),
            max(0.0, backward[number] - inputs[number]),
            activations=float(sizes[number]),
            saved=float(saved[number]),
            parameters=float(sum(each.nbytes for each in layer.parameters())),
            split=max(0.0, more[number]),
            spread=spread[number],
        )
        for number, layer in enumerate(layers)
    ]


def _time_pass(
    layers: Sequence[ChainLayer],
    sample: Sequence[Tensor],
    loss_of: Callable[[Any], Tensor],
    *,
    inputs_only: bool = False,
) -> tuple[list[float], list[float]]:
    """Returns the seconds of each layer's forward and backward in one pass.

    With `inputs_only` the sample's own gradients are computed, so that a chain whose parameters are frozen has any.
    """
    clock, count = _Clock(sample[0].device), len(layers)
    given = _stamp(clock, 0, tuple(_leaves(sample) if inputs_only else sample))
    for place, layer in enumerate(layers, 1):
        given = _call(layer, given)
        if inputs_only:  # an embedding's outputs have no gradient
            pairs = zip(given, _leaves(given), strict=True)
            given = tuple(each if each.requires_grad else leaf for each, leaf in pairs)
        given = _stamp(clock, place, given)
    loss = loss_of(as_argument(given))
    clock.forward[count] = begin = clock.now()  # the loss belongs to the last layer, in both directions
    loss.backward()  # type: ignore[no-untyped-call]
    clock.backward.setdefault(0, clock.now())
    clock.backward[count] = begin
    forward = [clock.forward[place + 1] - clock.forward[place] for place in range(count)]
    times = clock.backward  # where no gradient has passed, there is none
    backward = [
        times[place] - times[place + 1] if place in times and place + 1 in times else 0.0 for place in range(count)
    ]
    return forward, backward


def _time_split(layers: Sequence[ChainLayer], sample: Sequence[Tensor]) -> list[float]:
    """Returns, by layer, the seconds that a backward in two parts takes more than a whole one."""
    clock, more, given = _Clock(sample[0].device), [], tuple(sample)
    for number, layer in enumerate(layers):
        weights = [each for each in layer.parameters() if each.requires_grad]
        seconds = []
        for is_split in (False, True):
            leaves = tuple(_leaves(given) if number else given)
            found = _call(layer, leaves)
            outputs = [each for each in found if each.requires_grad]
            gradients = [torch.ones_like(each) for each in outputs]
            begin = clock.now()
            if is_split:
                backward = SplitBackward(outputs, gradients, [each for each in leaves if each.requires_grad], weights)
                backward.backward_input()
                backward.backward_weight()
            elif outputs:
                torch.autograd.backward(outputs, gradients)
            seconds.append(clock.now() - begin)
        more.append(seconds[1] - seconds[0])
        given = tuple(each.detach() for each in found)
    return more


def _measure_bytes(layers: Sequence[ChainLayer], sample: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Returns, by layer, bytes that it saves and gives, and the number of the first layer that does the same."""
    saved, sizes, same_as = [], [], []
    first: dict[Any, int] = {}
    given = tuple(sample)
    for number, layer in enumerate(layers):
        kind = (layer.signature, _shapes(layer.parameters()), _shapes(given), number == 0)
        same_as.append(first.setdefault(kind, number))
        with _count_saved(layer) as storages:
            given = _call(layer, tuple(_leaves(given)))
        saved.append(sum(storages.values()))
        given = tuple(each.detach() for each in given)
        sizes.append(sum(each.nbytes for each in given))
    return saved, sizes, same_as


def _stamp(clock: _Clock, place: int, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = _Timestamp.apply(clock, place, *given)  # type: ignore[no-untyped-call]
    return tuple(each if before.requires_grad else before.detach() for each, before in zip(found, given, strict=True))


def _call(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = layer(as_argument(given))
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _leaves(given: Sequence[Tensor]) -> Iterator[Tensor]:
    for each in given:
        yield each.detach().requires_grad_(each.is_floating_point())


def _shapes(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    return tuple((each.dtype, tuple(each.shape), each.requires_grad) for each in tensors)


def _half_range(seconds: Sequence[float]) -> float:
    lower, _, upper = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (0.0,) * 3
    return (upper - lower) / 2


def _pool(
    passes: Sequence[Sequence[float]], same_as: Sequence[int], statistic: Callable[[Sequence[float]], float]
) -> list[float]:
    """Returns for each layer a statistic of all passes, and of all layers that do the same."""
    pools: defaultdict[int, list[float]] = defaultdict(list)
    for one in passes:
        for number, seconds in enumerate(one):
            pools[same_as[number]].append(seconds)
    found = {first: statistic(pool) for first, pool in pools.items()}
    return [found[first] for first in same_as]


@contextmanager
def _count_saved(layer: nn.Module) -> Iterator[dict[int, int]]:
    """Counts the bytes that autograd keeps, each storage once, without those of the parameters."""
    own = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *layer.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    trained = [each for each in parameters if each.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
