"""What the layers of a model cost, measured while the whole model runs: forward, both halves of backward, and bytes.

    x ─●─ layer 0 ─●─ layer 1 ─●─ layer 2 ─●─ loss        ●: a mark, which notes when values, and gradients, pass it
      ◀●◀──────────●◀──────────●◀──────────●◀

So caches, allocator and fusion are those of a step, and the loss is the last layer's. torchgpipe copies each layer,
runs it alone and waits for the device after each; DeepSpeed counts parameters. A first layer has no gradient to pass
on, and a cheaper backward: it is measured so too. What a backward takes for inputs alone is measured with parameters
that want no gradient, and what both halves apart take more than a whole one by doing both, layer for layer.

The median of several passes is taken, after some that are thrown away, and how far they lie apart is told. Layers of
one class, with parameters and inputs of the same shapes, are one and the same, and share the median of all: their times
differ by noise.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import UsageError
from samestep.pipelines.chain import unpacked
from samestep.pipelines.halves import Halves
from samestep.pipelines.layers import Layer
from samestep.runtime import rng

__all__: list[str] = []

WARM_UP, REPEATS = 3, 10  # passes
PARTS = 3  # each with as many: whole, for inputs alone, in halves


@dataclass
class _Clock:
    """When values and gradients have passed each mark, in seconds.

    Attributes:
        ahead: by mark, of values.
        back: by mark, of gradients.
    """

    device: torch.device
    ahead: dict[int, float] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _Mark(torch.autograd.Function):
    """Changes nothing, and notes when it is passed, each way."""

    @staticmethod
    def forward(ctx: Any, clock: _Clock, place: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.clock, ctx.place = clock, place
        clock.ahead[place] = clock.now()
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.back[ctx.place] = ctx.clock.now()
        return None, None, *gradients


def profile_layers(
    layers: Sequence[tuple[str, nn.Module]],
    sample: Sequence[Tensor],
    lose: Callable[[Any], Tensor],
    repeats: int = REPEATS,
    passed: Callable[[], None] = lambda: None,
) -> list[Layer]:
    """Returns what each layer costs for a micro-batch like `sample`; parameters and their gradients stay as they are.

    Args:
        layers: names and modules, called one after another.
        sample: a micro-batch's inputs, on the layers' device.
        lose: makes a scalar of the last layer's outputs.
        repeats: passes whose median is taken.
        passed: called after each of PARTS * (WARM_UP + repeats) passes.

    Raises:
        UsageError: there are no passes to take the median of.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        >>> layers = profile_layers(list(model.named_children()), [torch.ones(2, 4)], torch.sum, 1)
        >>> [layer.activations for layer in layers]
        [64.0, 64.0]
    """
    if repeats < 1:
        raise UsageError(f"the median of {repeats} passes is to be taken: give 1 or more")
    chain = _Chain(layers, sample, lose, passed)
    with _kept(layers):
        whole = [chain.passed() for _ in range(WARM_UP + repeats)][WARM_UP:]
        with _without_gradients(layers):
            inputs = [chain.passed(inputs=True) for _ in range(WARM_UP + repeats)][WARM_UP:]
        split = [chain.split() for _ in range(WARM_UP + repeats)][WARM_UP:]
        saved, sizes, alike = chain.sized()
    forward, backward = _medians([one for one, _ in whole], alike), _medians([each for _, each in whole], alike)
    spread = _pooled([[sum(both) for both in zip(*one, strict=True)] for one in whole], alike, _spread)
    half = _medians([each for _, each in inputs], alike)
    more = _medians(split, alike)
    half[0] = 0.0  # nobody wants the gradients of a batch
    return [
        Layer(
            name,
            forward[number],
            min(half[number], backward[number]),
            max(0.0, backward[number] - half[number]),
            activations=float(sizes[number]),
            saved=float(saved[number]),
            parameters=float(sum(each.nbytes for each in layer.parameters())),
            split=max(0.0, more[number]),
            spread=spread[number],
        )
        for number, (name, layer) in enumerate(layers)
    ]


@dataclass
class _Chain:
    """Layers that are run with marks between them."""

    layers: Sequence[tuple[str, nn.Module]]
    sample: Sequence[Tensor]
    lose: Callable[[Any], Tensor]
    told: Callable[[], None]

    def passed(self, *, inputs: bool = False) -> tuple[list[float], list[float]]:
        """Returns the seconds of each layer's forward and backward in one pass.

        Args:
            inputs: the sample's own gradients are wanted, so that a chain without parameters' has any.
        """
        clock = _Clock(self.sample[0].device)
        given: Any = tuple(_wanting(self.sample) if inputs else self.sample)
        given = _marked(clock, 0, given)
        for place, (_, layer) in enumerate(self.layers, 1):
            given = _called(layer, given)
            if inputs:  # an embedding's have none
                given = tuple(
                    each if each.requires_grad else one for each, one in zip(given, _wanting(given), strict=True)
                )
            given = _marked(clock, place, given)
        count = len(self.layers)
        loss = self.lose(unpacked(given))
        clock.ahead[count] = begin = clock.now()  # the loss belongs to the last layer, both ways
        loss.backward()  # type: ignore[no-untyped-call]
        clock.back.setdefault(0, clock.now())
        clock.back[count] = begin
        self.told()
        forward = [clock.ahead[place + 1] - clock.ahead[place] for place in range(count)]
        return forward, list(_spent(clock.back, count))

    def split(self) -> list[float]:
        """Returns, by layer, the seconds that two halves of a backward, apart, take more than a whole one."""
        clock, more = _Clock(self.sample[0].device), []
        given: Any = tuple(self.sample)
        for number, (_, layer) in enumerate(self.layers):
            own = [each for each in layer.parameters() if each.requires_grad]
            seconds = []
            for halved in (False, True):
                leaves = tuple(_wanting(given) if number else given)
                found = _called(layer, leaves)
                outputs = [each for each in found if each.requires_grad]
                gradients = [torch.ones_like(each) for each in outputs]
                begin = clock.now()
                if halved:
                    halves = Halves(outputs, gradients, [each for each in leaves if each.requires_grad], own)
                    halves.first()
                    halves.second()
                elif outputs:
                    torch.autograd.backward(outputs, gradients)
                seconds.append(clock.now() - begin)
            more.append(seconds[1] - seconds[0])
            given = tuple(each.detach() for each in found)
        self.told()
        return more

    def sized(self) -> tuple[list[int], list[int], list[int]]:
        """Returns, by layer, bytes that it saves and gives, and the number of the first layer that it is like."""
        saved, sizes, alike = [], [], []
        first: dict[Any, int] = {}
        given: Any = tuple(self.sample)
        for number, (_, layer) in enumerate(self.layers):
            kind = (
                getattr(layer, "likeness", type(layer)),
                _shapes(layer.parameters()),
                _shapes(given),
                number == 0,
            )
            alike.append(first.setdefault(kind, number))
            with _counting(layer) as found:
                given = _called(layer, tuple(_wanting(given)))
            saved.append(sum(found.values()))
            given = tuple(each.detach() for each in given)
            sizes.append(sum(each.nbytes for each in given))
        return saved, sizes, alike


def _marked(clock: _Clock, place: int, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = _Mark.apply(clock, place, *given)  # type: ignore[no-untyped-call]
    return tuple(mark if before.requires_grad else before.detach() for mark, before in zip(found, given, strict=True))


def _called(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = layer(unpacked(given))
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _wanting(given: Sequence[Tensor]) -> Iterator[Tensor]:
    for each in given:
        yield each.detach().requires_grad_(each.is_floating_point())


def _shapes(tensors: Any) -> tuple[Any, ...]:
    return tuple((each.dtype, tuple(each.shape), each.requires_grad) for each in tensors)


def _spent(back: dict[int, float], count: int) -> Iterator[float]:
    """Yields the seconds between a layer's marks; none where no gradient has passed."""
    for place in range(count):
        yield back[place] - back[place + 1] if place + 1 in back and place in back else 0.0


def _medians(passes: Sequence[Sequence[float]], alike: Sequence[int]) -> list[float]:
    return _pooled(passes, alike, median)


def _spread(seconds: Sequence[float]) -> float:
    lower, _, upper = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (0.0,) * 3
    return (upper - lower) / 2


def _pooled(
    passes: Sequence[Sequence[float]], alike: Sequence[int], of: Callable[[Sequence[float]], float]
) -> list[float]:
    """Returns for each layer a figure of all passes, and of all layers that are like it."""
    pools: defaultdict[int, list[float]] = defaultdict(list)
    for one in passes:
        for number, seconds in enumerate(one):
            pools[alike[number]].append(seconds)
    found = {first: of(pool) for first, pool in pools.items()}
    return [found[first] for first in alike]


@contextmanager
def _counting(layer: nn.Module) -> Iterator[dict[int, int]]:
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
def _kept(layers: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    """Leaves gradients, buffers and the random stream as they were."""
    parameters = [each for _, layer in layers for each in layer.parameters()]
    buffers = [each for _, layer in layers for each in layer.buffers()]
    gradients, values = [each.grad for each in parameters], [each.clone() for each in buffers]
    for parameter in parameters:
        parameter.grad = None
    try:
        with rng.keep_generators():
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)


@contextmanager
def _without_gradients(layers: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    wanting = [each for _, layer in layers for each in layer.parameters() if each.requires_grad]
    try:
        for parameter in wanting:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)
