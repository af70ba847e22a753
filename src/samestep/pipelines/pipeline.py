"""One rank's part of a model that is cut into stages, and the step that all ranks take with it.

    a replica's batch, the same on all of its ranks

        micro-batches   0   1   2   3                 rank 0: stage 0 ──▶ rank 1: stage 1 ──▶ loss
        their weights   w0  w1  w2  w3                                ◀──

    the loss of a micro-batch   (its mean · w_i) / Σ w, over all micro-batches of all replicas, before its backward

so gradients add up to those of the whole batch, however unlike the micro-batches are, and nothing is scaled afterwards.
PyTorch's schedules average the means of micro-batches: with padding that the loss ignores, gradients are off by 40 %
(measured, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.batches import sliced, tensors_of
from samestep.errors import DataError, ModelError, UsageError
from samestep.pipelines.chain import layers_of, part_of, shared
from samestep.pipelines.choose import PipelinePlan
from samestep.pipelines.interpreter import Interpreter
from samestep.pipelines.messages import Messages
from samestep.pipelines.stage import Lose, Stage, Tensors
from samestep.runtime.exchange import gather_json, gather_tensors, tell_json
from samestep.runtime.world import World
from samestep.schedule.choose import named
from samestep.topology import cut_evenly

__all__: list[str] = []

Loss = Callable[[Any, Any], Tensor]
Weight = Callable[[Any], float]


class Pipeline(nn.Module):
    """One rank's stages of a model.

    Collective: every rank of the world must make it, with the same model and arguments.

    Args:
        model: an nn.Sequential; this rank keeps its own layers.
        world: made with `pipeline=` as many ranks as hold stages.
        loss_fn: takes the model's outputs and the targets, and gives the mean loss of a micro-batch, or all losses.
        ends: by stage, the layer behind its last one.
        schedule: a name of :data:`samestep.schedule.choose.NAMES`.
        micro_batches: that a batch is cut into; fewer where it has fewer samples.
        weight: of targets: how many items their mean loss is of, unmasked tokens say; their samples if None.

    Attributes:
        parts: this rank's stages, by number, under the names that they have in the model.

    Raises:
        ModelError: the model cannot be cut so.
        UsageError: the stages do not fit the world.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss_fn: Loss,
        *,
        ends: Sequence[int],
        schedule: str = "1f1b",
        micro_batches: int = 4,
        weight: Weight | None = None,
    ) -> None:
        super().__init__()
        layers = layers_of(model)
        cuts = _checked(ends, layers, world.pipeline.size)
        self.world = world
        self.micro_batches = micro_batches
        self._loss_fn, self._weight = loss_fn, weight
        self._names = [[name for name, _ in layers[begin:end]] for begin, end in cuts]
        chunks = len(cuts) // world.pipeline.size
        self._plans = cache(lambda count: named(schedule, world.pipeline.size, count, chunks))
        own = [stage for stage, rank in enumerate(self._plans(micro_batches).placement) if rank == world.pipeline.rank]
        self.parts = {stage: part_of(model, self._names[stage]) for stage in own}  # type: ignore[arg-type]
        for stage, part in self.parts.items():
            self.add_module(f"stage{stage}", part)
        self._interpreters = cache(self._interpreter)

    def _interpreter(self, count: int) -> Interpreter:
        plan = self._plans(count)
        stages = {number: Stage(number, part) for number, part in self.parts.items()}
        axis = self.world.pipeline
        return Interpreter(plan, axis.rank, stages, Messages(plan, axis, self.world.device))

    @property
    def last(self) -> int:
        """The position on the pipeline of the rank that has the last stage."""
        return self._plans(self.micro_batches).placement[-1]

    def step(self, batch: Sequence[Any]) -> Tensor:
        """Adds a batch's gradients to the parameters'; returns its loss, the same on every rank of the world.

        Collective: every rank must call it, those of one replica with the same batch.

        Args:
            batch: inputs and targets; of all tensors in it dim 0 runs over the samples.

        Raises:
            DataError: the tensors have not as many samples, or the batch has none.
        """
        *inputs, targets = batch
        cuts = cut_evenly(samples := _samples(batch), min(self.micro_batches, samples))
        weights = [self._weigh(targets, begin, end) for begin, end in cuts]
        total = self._total(sum(weights))

        def given(number: int) -> Tensors:
            return tuple(sliced(each, *cuts[number]) for each in inputs)

        def lose(number: int) -> Lose:
            wanted = sliced(targets, *cuts[number])
            return lambda outputs: self._part(outputs, wanted, weights[number], total)

        kinds = [tuple((each.dtype, each.shape[1:], end - begin) for each in inputs) for begin, end in cuts]
        before = self._taken_off()
        losses = self._interpreters(len(cuts)).run(given, lose, kinds)
        self._reduce(before)
        return self._told(losses)

    def _weigh(self, targets: Any, begin: int, end: int) -> float:
        return float(end - begin) if self._weight is None else float(self._weight(sliced(targets, begin, end)))

    def _total(self, own: float) -> float:
        """Returns the weight of the step, of all replicas. Collective over the data axis."""
        if self.world.data.size == 1:
            return own
        sum_ = torch.tensor([own], dtype=torch.float64)
        dist.all_reduce(sum_, group=self.world.data.control)
        return float(sum_)

    def _part(self, outputs: Tensors, targets: Any, weight: float, total: float) -> Tensor:
        if not weight:  # the mean of nothing is NaN; this is 0, and its gradients are
            return sum(each.flatten()[:0].sum() for each in outputs if each.is_floating_point())  # type: ignore[return-value]
        losses = self._loss_fn(outputs[0] if len(outputs) == 1 else outputs, targets)
        return losses * (weight / total) if losses.dim() == 0 else losses.sum() / total

    def _taken_off(self) -> dict[nn.Parameter, Tensor | None]:
        """Takes off what steps before have left, which is of all replicas already; nothing where there is but one."""
        if self.world.data.size == 1:
            return {}
        before = {parameter: parameter.grad for parameter in self.parameters() if parameter.requires_grad}
        for parameter in before:
            parameter.grad = None
        return before

    def _reduce(self, before: dict[nn.Parameter, Tensor | None]) -> None:
        """Adds the replicas' gradients of each stage to those of the steps before. Collective over the data axis."""
        for parameter, earlier in before.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=self.world.data.group)
            parameter.grad = gradient if earlier is None else earlier.add_(gradient)

    def _told(self, losses: list[Tensor]) -> Tensor:
        """Returns the step's loss, from the rank of the last stage, of all replicas. Collective."""
        loss = torch.zeros(1, dtype=torch.float64)
        for each in losses:
            loss += each.double().cpu()
        axis = self.world.pipeline
        if axis.size > 1:
            dist.broadcast(loss, axis.ranks[self.last], group=axis.control)
        if self.world.data.size > 1:
            dist.all_reduce(loss, group=self.world.data.control)
        return loss[0]

    def gradient_norms(self, norm_type: float = 2.0) -> list[Tensor]:
        """Returns the norm of each gradient of the whole model, in its order. Collective over the pipeline."""
        own = [
            (stage, torch.linalg.vector_norm(parameter.grad, norm_type))
            for stage, part in self.parts.items()
            for parameter in part.parameters()
            if parameter.grad is not None
        ]
        axis = self.world.pipeline
        values = torch.stack([norm for _, norm in own]) if own else torch.zeros(0)
        stages = [stage for told in gather_json(axis, [stage for stage, _ in own]) for stage in told]
        norms = torch.cat(gather_tensors(axis, values))
        pairs = sorted(zip(stages, norms, strict=True), key=lambda pair: pair[0])  # those of a stage are in order
        return [norm for _, norm in pairs]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters under the names that they have in the model."""
        for part in self.parts.values():
            yield from part.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's buffers likewise."""
        for part in self.parts.values():
            yield from part.named_buffers(*args, **kwargs)


def pipeline(model: nn.Module, world: World, plan: PipelinePlan) -> Pipeline:
    """Returns this rank's stages of a model that is cut as planned: on all ranks as rank 0 has planned it.

    Collective: every rank of the world must call it. Times that were measured differ between ranks, and so may plans.

    Args:
        model: that was planned for, on this rank's device.
        world: made with `pipeline=` the number of stages.
        plan: made by :func:`plan_pipeline`.
    """
    ends, schedule, micro_batches = tell_json(world.everyone, [plan.ends, plan.schedule, plan.micro_batches])
    return Pipeline(
        model, world, plan.loss_fn, ends=ends, schedule=schedule, micro_batches=micro_batches, weight=plan.weight
    )


def _checked(ends: Sequence[int], layers: Sequence[tuple[str, nn.Module]], ranks: int) -> list[tuple[int, int]]:
    """Returns begin and end of the stages, if they are all layers and can be computed apart."""
    cuts = list(zip((0, *ends), ends, strict=False))
    if not cuts or ends[-1] != len(layers) or any(begin >= end for begin, end in cuts):
        raise UsageError(
            f"ends={list(ends)} do not cut {len(layers)} layers into stages: give them in order, each stage one layer "
            f"at least, and {len(layers)} as the last"
        )
    if len(cuts) % ranks:
        raise UsageError(f"{len(cuts)} stages cannot be dealt evenly to {ranks} ranks: give a multiple of {ranks}")
    stage_of = {layer: stage for stage, (begin, end) in enumerate(cuts) for layer in range(begin, end)}
    for group in shared(layers):
        if len({stage_of[layer] for layer in group}) > 1:
            names = " and ".join(layers[layer][0] for layer in sorted(group))
            raise ModelError(f"layers {names} share a weight, and are in different stages: put them into one")
    return cuts


def _samples(batch: Sequence[Any]) -> int:
    sizes = {len(each) for each in tensors_of(batch)}
    if len(sizes) != 1:
        raise DataError(
            f"the tensors of a batch have {' and '.join(map(str, sorted(sizes)))} samples: dim 0 must agree"
        )
    if not (samples := sizes.pop()):
        raise DataError("the batch has no sample")
    return samples
