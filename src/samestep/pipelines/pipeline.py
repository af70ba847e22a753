"""One rank's part of a model that is cut into stages, and the step that all ranks take with it.

    a replica's batch, the same on all of its ranks

        micro-batches   0   1   2   3                 rank 0: stage 0 ──▶ rank 1: stage 1 ──▶ loss
        their weights   w0  w1  w2  w3                                ◀──

    the loss of a micro-batch   (its mean · w_i) / Σ w, over all micro-batches of all replicas, before its backward

so gradients add up to those of the whole batch, however unequal the micro-batches are, and nothing is scaled
afterwards. PyTorch's schedules average the means of micro-batches: with padding that the loss ignores, gradients are
wrong by 40 % (measured, torch 2.13).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from samestep.compress.codecs import Codec
from samestep.data.batches import slice_batch
from samestep.errors import DataError, ModelError, UsageError
from samestep.pipelines.batch_check import BatchCheck, CheckedShapes, Ranges, count_samples, split_targets
from samestep.pipelines.chain_layer import Call, LayerChain, as_argument
from samestep.pipelines.devices import DevicesArg, resolve_devices
from samestep.pipelines.executor import LossOf, ScheduleExecutor, Stage, Tensors
from samestep.pipelines.gradient_sync import ReplicaGradientSync, make_compression
from samestep.pipelines.losses import LossFn, MicroBatchLoss, WeightFn
from samestep.pipelines.model_chain import AnyModel, build_chain, normalize_model, stage_ranges
from samestep.pipelines.report import PipelineReport, Prediction, StepTimer, make_report
from samestep.pipelines.tied_weights import TiedGradients, find_tied, tied_source, untie
from samestep.pipelines.transport import LocalTransport, RankTransport, open_channels
from samestep.replicas.buffers import sync_buffers
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json, all_gather_tensors, broadcast_json
from samestep.runtime.world import World
from samestep.schedule.algorithms import forward_only, make_schedule
from samestep.schedule.schedule import Schedule
from samestep.seeding import GOLDEN, derive_seed
from samestep.topology import cut_evenly

__all__ = ["Pipeline"]


@dataclass(frozen=True)
class FullModel:
    """What is known of the whole model on every rank."""

    state: dict[str, Tensor]  # name -> its entry in the state, without storage, in the model's order
    parameters: dict[str, list[int]]  # name -> shape, in the model's order


class Pipeline(nn.Module):
    """One rank's stages of a model; made by :func:`samestep.pipeline`.

    Collective: every rank of the world must make it, with the same model and arguments.

    Args:
        model: an nn.Sequential, a list of modules, or any with example inputs; this rank keeps its own layers.
        world: made with `pipeline=` as many ranks as hold stages; one if each process holds all.
        loss_fn: takes the model's outputs and the targets, and gives the mean loss of a micro-batch, or all losses.
        ends: by stage, the layer behind its last one.
        schedule: a name of :data:`samestep.schedule.algorithms.SCHEDULE_NAMES`.
        micro_batches: that a batch is cut into; fewer where it has fewer samples.
        split_size: samples of a micro-batch at most, from which the number of each batch's follows; instead of
            `micro_batches`.
        weight: of targets: how many items their mean loss is of, unmasked tokens say; their samples if None. Within a
            loop over :func:`samestep.shards` its `weight` counts, and this is not asked.
        prediction: what the plan was made with, for the report.
        example_inputs: with which the forward of a model that is no nn.Sequential is traced.
        digest: of the forward where the plan was made.
        splits: where it was split into layers.
        codec: by which gradients travel between replicas; None as they are.
        devices: by stage, that this process computes on; one stage on the world's device if None. Or how many of its
            own this process has.
        loss_warning: why the losses of micro-batches do not add up to that of a batch; None if they do, or nobody
            knows.

    Attributes:
        parts: this rank's stages, by number, under the names that they have in the model.
        devices: of these stages, by number.
        full_model: the names and shapes of the whole model.
        rng: the random numbers of its layers.
        compression: of the gradients; None without a codec, or for one replica.
        aliases: name of a copy -> name of the weight that it is a copy of, on all stages.

    Raises:
        ModelError: the model cannot be cut so.
        UsageError: the stages do not fit the world, or the devices, or one of these is not there.
    """

    def __init__(
        self,
        model: AnyModel,
        world: World,
        loss_fn: LossFn,
        *,
        ends: Sequence[int],
        schedule: str = "1f1b",
        micro_batches: int = 4,
        weight: WeightFn | None = None,
        prediction: Prediction | None = None,
        example_inputs: Sequence[Tensor] = (),
        digest: str = "",
        splits: Sequence[int] = (),
        split_size: int | None = None,
        devices: DevicesArg = None,
        codec: Codec | None = None,
        loss_warning: str | None = None,
    ) -> None:
        super().__init__()
        model = normalize_model(model)
        axis, own_devices = world.pipeline, resolve_devices(devices, world)
        self._holds_all = axis.size == 1
        ranks = len(own_devices) if self._holds_all else axis.size
        fits = ranks == len(ends) or (ranks and schedule == "interleaved" and len(ends) % ranks == 0)
        if devices is not None and self._holds_all and not fits:
            raise UsageError(f"{ranks} device{'' if ranks == 1 else 's'} for {len(ends)} stages: give one for each")
        chain = _chain_as_planned(model, example_inputs, digest, splits)
        ranges = stage_ranges(chain.layers, ends, ranks, copied=find_tied(model, chain.layers))
        self.full_model = FullModel(
            {name: each.detach().to("meta") for name, each in model.state_dict().items()},
            {name: list(each.shape) for name, each in model.named_parameters() if tied_source(each) is each},
        )
        tied_weights = untie(model, chain.layers)
        self.world = world
        self.number = world.next_id()
        self.micro_batches, self.split_size = micro_batches, split_size
        self._losses = MicroBatchLoss(loss_fn, weight, world, loss_warning)
        per_rank = len(ranges) // ranks
        self._schedules = cache(lambda count: make_schedule(schedule, ranks, count, per_rank))
        self._forward_schedules = cache(lambda count: forward_only(ranks, count, per_rank))
        self._placement = self._schedules(micro_batches).placement
        own = [stage for stage, rank in enumerate(self._placement) if self._holds_all or rank == axis.rank]
        self.devices = {stage: own_devices[self._placement[stage] if self._holds_all else 0] for stage in own}
        self._local_transport = LocalTransport(self.devices)
        if self._holds_all and devices is not None:
            world.input_device = self.devices[0]
        self.parts: dict[int, nn.Module] = {}
        self._calls: dict[int, list[tuple[int, Call]]] = {}
        for stage in own:
            part, calls = chain.extract_stage(*ranges[stage])
            self.parts[stage] = part.to(self.devices[stage])
            self._calls[stage] = list(enumerate(calls, ranges[stage][0]))
            self.add_module(f"stage{stage}", part)
        seed = broadcast_json(world.everyone, torch.initial_seed())
        self._placeholder = (nn.Parameter(torch.empty(0), requires_grad=False),)  # in a tuple: not registered
        self.rng = LayerRng(derive_seed(seed, "pipeline", self.number), world.data.rank, own_devices)
        self._trainers = cache(lambda count: self._executor(self._schedules(count), self._timer))
        self._evaluators = cache(lambda count: self._executor(self._forward_schedules(count)))
        holders = [self._holder(stage) for stage, one in enumerate(ranges) for _ in range(*one)]
        tied = TiedGradients(tied_weights, holders, dict(self.named_parameters()), axis)
        self.aliases = tied.aliases
        self.compression = make_compression(self, world, codec, self.devices.values())
        self._batch_check = BatchCheck(axis, self.number, dict(self.named_parameters()), self.aliases)
        self._gradient_sync = ReplicaGradientSync(self, world, tied, self.compression)
        self._channels = open_channels(axis, own_devices[0])
        self._timer, self._prediction = StepTimer(self.devices), prediction
        world.register(self)

    def _executor(self, schedule: Schedule, timer: StepTimer | None = None) -> ScheduleExecutor:
        stages = {
            number: Stage(number, part, self._stage_call(number), self.devices[number])
            for number, part in self.parts.items()
        }
        if self._holds_all:
            return ScheduleExecutor(schedule, None, stages, self._local_transport, timer)
        axis = self.world.pipeline
        return ScheduleExecutor(schedule, axis.rank, stages, RankTransport(schedule, axis, self._channels), timer)

    def _stage_call(self, stage: int) -> Callable[[int, Tensors], Any]:
        """Returns what calls one layer after another, each with random numbers of its own."""
        calls, device = self._calls[stage], self.devices[stage]

        def call(micro_batch: int, inputs: Tensors) -> Any:
            given = as_argument(inputs)
            for number, layer in calls:
                self.rng.seed_layer(micro_batch, number, device)
                given = layer(given)
            return given

        return call

    @property
    def placeholder(self) -> nn.Parameter:
        """What an optimizer is given of stages without parameters."""
        return self._placeholder[0]

    @property
    def last_stage_rank(self) -> int:
        """The position on the pipeline of the rank that has the last stage."""
        return self._holder(-1)

    def _holder(self, stage: int) -> int:
        return 0 if self._holds_all else self._placement[stage]

    def step(self, batch: Sequence[Any]) -> Tensor:
        """Adds a batch's gradients to the parameters'; returns its loss, the same on every rank of the world.

        Collective: every rank must call it, those of one replica with the same batch.

        Within a loop over :func:`samestep.shards`, the loss is the micro-batch's part of the step's, to which those of
        all micro-batches and replicas add up, as `Shards.mean` has it; gradients are summed over the replicas with
        the last micro-batch of the step. Elsewhere each call is a step of its own.

        Args:
            batch: inputs and targets, on any device; of all tensors in it dim 0 runs over the samples.

        Returns:
            The mean loss, 0-dim, float64, on the host.

        Raises:
            DataError: the tensors have not as many samples, or the batch has none and no loop over shards gave it.
        """
        (inputs, targets), mean = split_targets(batch), self.world.step.mean
        samples = count_samples(batch)
        ranges = self._micro_batch_ranges(samples, may_be_empty=mean is not None)
        shapes = self._batch_check.start(inputs, targets, ranges, trains=True)
        weights, total = self._losses.weights(batch, ranges)
        targets = self._to_stage(targets, len(self._placement) - 1)

        def loss_of(number: int) -> LossOf:
            own = slice_batch(targets, *ranges[number])
            return lambda outputs: self._losses.part(outputs, own, weights[number], total)

        with self._timer.step(self._schedules(len(ranges)), samples) if ranges else nullcontext():
            self._gradient_sync.begin()
            with self.rng.step():
                losses = self._run(self._trainers, inputs, ranges, shapes, loss_of)
            self._gradient_sync.end()
            share = torch.zeros(1, dtype=torch.float64)  # the replica's, from the rank of the last stage
            for (each,) in losses:
                share += each.double().cpu()
            axis = self.world.pipeline
            if axis.size > 1:
                dist.broadcast(share, axis.ranks[self.last_stage_rank], group=axis.control)
            if mean is not None:
                mean.add(share)
            if self.world.data.size > 1:
                dist.all_reduce(share, group=self.world.data.control)
        return share[0]

    def report(self) -> PipelineReport:
        """Returns what the last steps took, what was predicted, and where the time went; the same on every rank.

        Collective over the pipeline: every rank of the replica must call it. Up to 50 steps are kept.

        Raises:
            StepError: no step was taken.
        """
        return make_report(self.world, self._timer.timings(), self._prediction)

    def forward(self, *inputs: Any) -> Any:
        """Returns what the model gives for a batch, the same on every rank of the replica; without gradients.

        Collective over the pipeline: every rank of the replica must call it, with the same batch.

        Args:
            inputs: of which dim 0 runs over the samples.

        Returns:
            A tensor, or a tuple of several, of all samples, on the world's device.

        Raises:
            DataError: the tensors have not as many samples, or none.
        """
        ranges = self._micro_batch_ranges(count_samples(inputs), may_be_empty=False)
        shapes = self._batch_check.start(inputs, None, ranges, trains=False)
        results = self._run(self._evaluators, inputs, ranges, shapes, None)
        axis, device = self.world.pipeline, self.world.device
        whole = [torch.cat(each).to(device) for each in zip(*results, strict=True)]
        whole = broadcast_tensors(axis, self.last_stage_rank, whole, device, axis.group)
        return as_argument(tuple(whole))

    def _micro_batch_ranges(self, samples: int, *, may_be_empty: bool) -> list[tuple[int, int]]:
        if not samples and not may_be_empty:
            raise DataError("the batch has no sample")
        count = self.micro_batches if self.split_size is None else -(-samples // self.split_size)
        return cut_evenly(samples, min(count, samples)) if samples else []

    def _to_stage(self, batch: Any, stage: int) -> Any:
        """Returns what the user gives on the device of a stage, if it is here."""
        return self._local_transport.to_stage(batch, stage) if stage in self.parts else batch

    def _run(
        self,
        executors: Callable[[int], ScheduleExecutor],
        inputs: Sequence[Any],
        ranges: Ranges,
        shapes: CheckedShapes,
        loss_of: Callable[[int], LossOf] | None,
    ) -> list[Tensors]:
        if not ranges:  # other replicas have all that is left of an epoch
            shapes.verify()
            return []

        def inputs_of(number: int) -> Tensors:
            return self._to_stage(tuple(slice_batch(each, *ranges[number]) for each in inputs), 0)  # type: ignore[no-any-return]

        return executors(len(ranges)).run(inputs_of, loss_of, shapes)

    def sync_buffers(self) -> None:
        """Makes buffers equal on all replicas. Collective: all call it."""
        sync_buffers(self, self.world.data)

    def release(self) -> None:
        """Closes the memory and groups that are shared with other ranks; the world calls it when it closes."""
        self._gradient_sync.release()
        for channel in self._channels.values():
            channel.close()

    def gradient_norms(self, norm_type: float = 2.0) -> list[Tensor]:
        """Returns the norm of each gradient of the whole model, in its order. Collective over the pipeline."""
        own = {
            name: torch.linalg.vector_norm(parameter.grad, norm_type)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and name not in self.aliases
        }
        axis = self.world.pipeline
        names = [name for theirs in all_gather_json(axis, list(own)) for name in theirs]
        norms = dict(zip(names, torch.cat(all_gather_tensors(axis, _on_host(list(own.values())))), strict=True))
        return [norms[name] for name in self.full_model.parameters if name in norms]

    def gathered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what all ranks of the pipeline have, under its names, on the host of each. Collective over it.

        Args:
            own: what this rank has, under names that no other rank uses.
        """
        axis, found = self.world.pipeline, dict[str, Tensor]()
        for source, names in enumerate(all_gather_json(axis, list(own))):
            copies = [each.detach().to("cpu", copy=True).contiguous() for each in own.values()]
            tensors = copies if source == axis.rank else []
            tensors = broadcast_tensors(axis, source, tensors, torch.device("cpu"), axis.control)
            found |= zip(names, tensors, strict=True)
        return found

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Returns the state of the whole model, on the host of every rank: what an unsplit one loads.

        Collective over the pipeline: every rank of the replica must call it.
        """
        own = {name: each for name, each in self.state_dict().items() if name not in self.aliases}
        found = self.gathered(own)
        return {name: found[self.aliases.get(name, name)] for name in self.full_model.state}

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns the state of this rank's stages, under the names of the model."""
        destination = OrderedDict() if destination is None else destination
        for part in self.parts.values():
            part.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's part of a state: of the whole model's, or of these stages alone.

        Raises:
            RuntimeError: shapes differ; with `strict`, an entry is missing, or none of the model's.
        """
        own = self.state_dict().keys()
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in self.full_model.state]
        if strict and (missing or unexpected):
            lacks, has = ", ".join(missing[:6]), ", ".join(unexpected[:6])
            what = f"lacks {lacks}" if missing else f"has {has}, which it has not"
            raise RuntimeError(f"the state {what}: it is not that of this model")
        for part in self.parts.values():
            entries = {name: state_dict[name] for name in part.state_dict() if name in state_dict}
            part.load_state_dict(entries, strict=strict, assign=assign)
        return _IncompatibleKeys(missing, unexpected)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters under the names that they have in the model."""
        for part in self.parts.values():
            yield from part.named_parameters(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields them; where these stages have none, one without a value, which an optimizer needs to be made."""
        yield from list(super().parameters(recurse)) or [self.placeholder]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """DistributedDataParallel asks for it: it would send stage 0's parameters to the other stages."""
        raise ModelError(
            "a pipeline adds up its gradients over the replicas by itself: leave samestep.replicate and "
            "DistributedDataParallel out, and make the world with more ranks than stages"
        )

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's buffers under the names that they have in the model."""
        for part in self.parts.values():
            yield from part.named_buffers(*args, **kwargs)


class LayerRng:
    """Random numbers of one rank's layers, dropout's above all: seeded by step, micro-batch and layer, on any rank.

        seed = (seed, replica) · step · micro-batch · layer        so a layer draws the same, however the model is cut,
                                                                   whatever the schedule, and in one process too

    In torch's own pipelines a stage draws from the stream of its process: with other cuts, or micro-batches in another
    order, it is another training. Torch's generators are seeded, on the host and on the layer's device; Python's and
    NumPy's are not. After a step the streams are where they were before it.
    """

    def __init__(self, seed: int, replica: int, devices: Sequence[torch.device]) -> None:
        self.steps = 0  # micro-batches of a loader, or steps without one, that have been taken
        self._seed = seed
        self._replica = replica
        self._gpus = [each for each in dict.fromkeys(devices) if each.type == "cuda"]
        self._seeds: dict[int, int] | None = None  # by micro-batch; None outside of a step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Makes :meth:`seed_layer` seed; afterwards the streams are where they were. A failed step counts, too."""
        self._seeds = {}
        try:
            with torch.random.fork_rng(self._gpus):
                yield
        finally:
            self._seeds = None
            self.steps += 1

    def seed_layer(self, micro_batch: int, layer: int, device: torch.device) -> None:
        """Seeds torch's generators before a layer computes a micro-batch on a device."""
        if self._seeds is None:
            return
        if micro_batch not in self._seeds:
            self._seeds[micro_batch] = derive_seed(self._seed, self._replica, self.steps, micro_batch)
        seed = (self._seeds[micro_batch] + layer * GOLDEN) & ((1 << 63) - 1)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)

    def state(self) -> list[int]:
        """Returns what a resumed run continues from; the same on every rank."""
        return [self._seed, self.steps]

    def load(self, state: list[int]) -> None:
        self._seed, self.steps = state


def _chain_as_planned(
    model: nn.Module, example_inputs: Sequence[Tensor], digest: str, splits: Sequence[int]
) -> LayerChain:
    like = next((each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()), torch.ones(()))
    # of the model's type, too: it may have been cast since it was planned for
    inputs = [each.to(like if each.is_floating_point() else like.device) for each in example_inputs]
    chain = build_chain(model, inputs or None, splits)
    if digest and chain.digest != digest:
        raise ModelError(
            f"{type(model).__name__}'s forward is not what it was where the plan was made: all ranks must have one "
            "model, of one size"
        )
    return chain


def _on_host(scalars: Sequence[Tensor]) -> Tensor:
    """Returns scalars as one tensor on the host; devices are waited for once for all that are there in a row.

    >>> _on_host([torch.tensor(1.0), torch.tensor(2.0)])
    tensor([1., 2.])
    """
    rows = [torch.stack(list(row)).cpu() for _, row in groupby(scalars, key=lambda each: each.device)]
    return torch.cat(rows) if rows else torch.zeros(0)


def broadcast_tensors(
    axis: Axis, source: int, tensors: Sequence[Tensor], device: torch.device, group: Any
) -> list[Tensor]:
    """Returns the tensors of one rank, `source`, on a device of every rank. Collective over the axis.

    `group` is the axis's for such a device; on the other ranks `tensors` are not read.
    """
    own = [each.detach().to(device).contiguous() for each in tensors]
    if axis.size == 1:
        return own
    shapes = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in own]
    shapes = broadcast_json(axis, shapes, source)
    if axis.rank != source:
        own = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in shapes]
    for each in own:
        dist.broadcast(each, axis.ranks[source], group=group)
    return own
