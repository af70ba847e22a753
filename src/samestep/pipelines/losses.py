"""The loss of each micro-batch as its part of the step's, and whether such parts add up to it.

    loss of 8 samples, of which 5 items count      (3 · mean of the first 3 items  +  2 · mean of the other 2) / 5

A mean loss knows of how many items it is the mean, and the pipeline does not: padding that cross entropy ignores, say.
Weighted by samples the parts add up to another loss, and the gradients are wrong by as much as PyTorch's, which average
the means of micro-batches. So plan_pipeline compares the loss of some samples with its parts'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.batches import slice_batch, tensors_of
from samestep.errors import DataError
from samestep.pipelines.batch_check import Ranges, count_samples
from samestep.pipelines.chain_layer import preserve_state, sequential
from samestep.pipelines.executor import Tensors
from samestep.runtime import rng
from samestep.runtime.world import World

LossFn = Callable[[Any, Any], Tensor]
WeightFn = Callable[[Any], float]
MAX_SLICES = 4  # of a batch, that are compared
TOLERANCE = 1e-3  # of a loss: its parts in float32 may differ by 1e-6, means of unequal numbers by some 1e-2


@dataclass(eq=False)
class MicroBatchLoss:
    loss_fn: LossFn  # takes outputs and targets, and gives the mean loss of a micro-batch, or all losses
    weight: WeightFn | None  # of targets: how many items their mean loss is of; their samples if None
    world: World  # whose replicas share a step
    warning: str | None  # why parts of this loss do not add up to it; None if they do

    def weights(self, batch: Sequence[Any], ranges: Ranges) -> tuple[list[float], float]:
        """Returns the weights of micro-batches, and that of the step. Collective over the data axis without shards."""
        mean = self.world.step.mean
        is_split = len(ranges) > 1 or self.world.data.size > 1
        if self.warning is not None and is_split and not (mean and mean.weighted):
            raise DataError(self.warning)
        weigh = self._weigh if mean is None else mean.weigh
        weights = [weigh(slice_batch(batch, *one)) for one in ranges]
        if mean is not None:
            return weights, mean.total
        total = torch.tensor([sum(weights)], dtype=torch.float64)
        if self.world.data.size > 1:
            dist.all_reduce(total, group=self.world.data.control)
        return weights, float(total)

    def _weigh(self, samples: Sequence[Any]) -> float:
        return float(count_samples(samples)) if self.weight is None else float(self.weight(samples[-1]))

    def part(self, outputs: Tensors, targets: Any, weight: float, total: float) -> Tensor:
        if not weight:  # the mean of nothing is NaN; this is 0, and so are its gradients
            return sum(each.flatten()[:0].sum() for each in outputs if each.is_floating_point())  # type: ignore[return-value]
        losses = self.loss_fn(outputs[0] if len(outputs) == 1 else outputs, targets)
        return losses * (weight / total) if losses.dim() == 0 else losses.sum() / total


def additivity_problem(
    layers: Sequence[nn.Module],
    batch: Sequence[Any],
    loss_fn: LossFn,
    weight: WeightFn | None,
    size: int | None = None,
) -> str | None:
    """Returns in words why the loss of some samples is not the sum of its parts; None where it is.

    Nothing is trained, and the random stream, modes and buffers stay as they are. A loss that draws random numbers
    cannot be compared, nor one of a model whose output for a sample depends on the other samples.

    The first samples of a batch are compared, `size` of them together, or all of them if None.

    Example:
        >>> batch = torch.ones(4, 3), torch.tensor([0, 2, -100, -100])
        >>> additivity_problem([nn.Linear(3, 3)], batch, nn.functional.cross_entropy, lambda y: (y >= 0).sum()) is None
        True
        >>> additivity_problem([nn.Linear(3, 3)], batch, nn.functional.cross_entropy, None)[:27]
        'the loss of the 4 samples i'
    """
    samples = count_samples(batch)
    size = samples if size is None else size
    slices = (slice_batch(batch, begin, begin + size) for begin in range(0, min(samples, MAX_SLICES * size), size))
    with preserve_state(*layers), torch.no_grad():
        for layer in layers:
            layer.eval()
        problems = (_problem_of(layers, one, loss_fn, weight) for one in slices)
        return next((problem for problem in problems if problem), None)


def _problem_of(
    layers: Sequence[nn.Module], batch: Sequence[Any], loss_fn: LossFn, weight: WeightFn | None
) -> str | None:
    samples = count_samples(batch)
    total = float(samples) if weight is None else float(weight(batch[-1]))

    def outputs(begin: int, end: int) -> Any:
        return sequential(layers)(*slice_batch(batch[:-1], begin, end))

    def part(given: Any, begin: int, end: int, seed: int = 0) -> float:
        targets = slice_batch(batch[-1], begin, end)
        own = float(end - begin) if weight is None else float(weight(targets))
        if not own:
            return 0.0
        with rng.keep_generators():
            torch.manual_seed(seed)
            losses = loss_fn(given, targets)
        return float(losses * (own / total) if losses.dim() == 0 else losses.sum() / total)

    given = outputs(0, samples)
    whole = part(given, 0, samples)
    if not math.isfinite(whole) or whole != part(given, 0, samples, seed=1):
        return None
    for cut in sorted({samples // 2, samples // 3} - {0}):
        first, second = outputs(0, cut), outputs(cut, samples)
        if not _are_independent(given, first, second):
            return None
        parts = part(first, 0, cut), part(second, cut, samples)
        if not abs(whole - sum(parts)) <= TOLERANCE * max(map(abs, (whole, *parts))):  # true of NaN, too
            by = "by their samples" if weight is None else "by the weight that was given"
            return (
                f"the loss of the {samples} samples is {whole:.6g}, and those of micro-batches, {by}, add up to "
                f"{sum(parts):.6g}: give shards or plan_pipeline weight=, which counts the items that the loss is a "
                "mean of, (y != -100).sum() of targets y say; a loss_fn that gives the mean, or all losses, and no "
                "sum; or, if each loss depends on the other samples, micro_batches=1"
            )
    return None


def _are_independent(whole: Any, *parts: Any) -> bool:
    """Whether a model gives the same for a sample beside any others, so that losses can be compared."""
    for each, *some in zip(*(tensors_of([given]) for given in (whole, *parts)), strict=True):
        if not each.dim() or each.is_complex() or sum(map(len, some)) != len(each):
            return False
        if any(one.shape[1:] != each.shape[1:] for one in some):
            return False
        difference = torch.cat(some).double() - each.double()
        if not difference.norm() <= TOLERANCE * each.double().norm():
            return False
    return True
