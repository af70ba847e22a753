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

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from samestep.compress.codec import Codec
from samestep.data.batches import slice_batch
from samestep.errors import DataError, ModelError
from samestep.pipelines.batch import Cuts, samples_of, split
from samestep.pipelines.chain import Whole, chain_of, stages_of, unpacked
from samestep.pipelines.cutting import Call, Recipe
from samestep.pipelines.devices import Asked, check_number, devices_of
from samestep.pipelines.draws import Draws
from samestep.pipelines.given import Given, opened
from samestep.pipelines.interpreter import Interpreter
from samestep.pipelines.losses import Loss, Losses, Weight
from samestep.pipelines.messages import Messages
from samestep.pipelines.outputs import gathered, on_host, told
from samestep.pipelines.reduction import BY_ITSELF, Reduction, compression_of
from samestep.pipelines.report import Foreseen, PipelineReport, reported
from samestep.pipelines.rollcall import Roll, RollCall
from samestep.pipelines.shelves import shelves
from samestep.pipelines.stage import Lose, Stage, Tensors
from samestep.pipelines.stopwatch import Stopwatch
from samestep.pipelines.ties import Copies, parted, ties_of
from samestep.pipelines.transfers import Transfers
from samestep.replicas.buffers import sync_buffers
from samestep.runtime.exchange import all_gather_json, all_gather_tensors, broadcast_json
from samestep.runtime.world import World
from samestep.schedule.choose import make_schedule
from samestep.schedule.forward_only import forward_only
from samestep.schedule.plan import Schedule
from samestep.seeding import derive_seed
from samestep.topology import cut_evenly

__all__ = ["Pipeline"]


class Pipeline(nn.Module):
    """One rank's stages of a model; made by :func:`samestep.pipeline`.

    Collective: every rank of the world must make it, with the same model and arguments.

    Args:
        model: an nn.Sequential, a list of modules, or any with a recipe; this rank keeps its own layers.
        world: made with `pipeline=` as many ranks as hold stages; one if each process holds all.
        loss_fn: takes the model's outputs and the targets, and gives the mean loss of a micro-batch, or all losses.
        ends: by stage, the layer behind its last one.
        schedule: a name of :data:`samestep.schedule.choose.SCHEDULE_NAMES`.
        micro_batches: that a batch is cut into; fewer where it has fewer samples.
        split_size: samples of a micro-batch at most, from which the number of each batch's follows; instead of
            `micro_batches`.
        weight: of targets: how many items their mean loss is of, unmasked tokens say; their samples if None. Within a
            loop over :func:`samestep.shards` its `weight` counts, and this is not asked.
        foreseen: what the plan was made with, for the report.
        recipe: how a model that is no nn.Sequential is cut into layers.
        codec: by which gradients travel between replicas; None as they are.
        devices: by stage, that this process computes on; one stage on the world's device if None. Or how many of its
            own this process has.
        doubt: why the losses of micro-batches do not add up to that of a batch; None if they do, or nobody knows.

    Attributes:
        parts: this rank's stages, by number, under the names that they have in the model.
        devices: of these stages, by number.
        whole: the names and shapes of the whole model.
        draws: the random numbers of its layers.
        compression: of the gradients; None without a codec, or for one replica.
        aliases: name of a copy -> name of the weight that it is a copy of, on all stages.

    Raises:
        ModelError: the model cannot be cut so.
        UsageError: the stages do not fit the world, or the devices, or one of these is not there.
    """

    def __init__(
        self,
        model: Given,
        world: World,
        loss_fn: Loss,
        *,
        ends: Sequence[int],
        schedule: str = "1f1b",
        micro_batches: int = 4,
        weight: Weight | None = None,
        foreseen: Foreseen | None = None,
        recipe: Recipe | None = None,
        split_size: int | None = None,
        devices: Asked = None,
        codec: Codec | None = None,
        doubt: str | None = None,
    ) -> None:
        super().__init__()
        model = opened(model)
        axis, here = world.pipeline, devices_of(devices, world)
        self._holds_all = axis.size == 1
        if devices is not None and self._holds_all:
            check_number(len(here), len(ends), schedule)
        ranks = len(here) if self._holds_all else axis.size
        chain = chain_of(model, recipe=recipe)
        cuts = stages_of(chain.layers, ends, ranks, apart=ties_of(model, chain.layers))
        self.whole = Whole.of(model)
        ties = parted(model, chain.layers)
        self.world = world
        self.number = world.next_id()
        self.micro_batches, self.split_size = micro_batches, split_size
        self._losses = Losses(loss_fn, weight, world, doubt)
        chunks = len(cuts) // ranks
        self._plans = cache(lambda count: make_schedule(schedule, ranks, count, chunks))
        self._passes = cache(lambda count: forward_only(ranks, count, chunks))
        self._placement = self._plans(micro_batches).placement
        own = [stage for stage, rank in enumerate(self._placement) if self._holds_all or rank == axis.rank]
        self.devices = {stage: here[self._placement[stage] if self._holds_all else 0] for stage in own}
        self._transfers = Transfers(self.devices)
        if self._holds_all and devices is not None:
            world.input_device = self.devices[0]
        self.parts: dict[int, nn.Module] = {}
        self._layers: dict[int, list[tuple[int, Call]]] = {}
        for stage in own:
            part, calls = chain.part(*cuts[stage])
            self.parts[stage] = part.to(self.devices[stage])
            self._layers[stage] = list(enumerate(calls, cuts[stage][0]))
            self.add_module(f"stage{stage}", part)
        seed = broadcast_json(world.everyone, torch.initial_seed())
        self._nothing = (nn.Parameter(torch.empty(0), requires_grad=False),)
        self.draws = Draws(derive_seed(seed, "pipeline", self.number), world.data.rank, here)
        self._training, self._forwards = cache(self._trains), cache(self._evaluates)
        holders = [self._holder(stage) for stage, (begin, end) in enumerate(cuts) for _ in range(begin, end)]
        copies = Copies(ties, holders, dict(self.named_parameters()), axis)
        self.aliases = copies.aliases
        self.compression = compression_of(self, world, codec, self.devices.values())
        self._roll = RollCall(axis, self.number, dict(self.named_parameters()), self.aliases)
        self._reduction = Reduction(self, world, copies, self.compression)
        self._shelves = shelves(axis, here[0])
        self._watch, self._foreseen = Stopwatch(self.devices), foreseen
        world.register(self)

    def _trains(self, count: int) -> Interpreter:
        return self._interpreter(self._plans(count), self._watch)

    def _evaluates(self, count: int) -> Interpreter:
        return self._interpreter(self._passes(count))

    def _interpreter(self, plan: Schedule, watch: Stopwatch | None = None) -> Interpreter:
        stages = {
            number: Stage(number, part, self._call(number), self.devices[number]) for number, part in self.parts.items()
        }
        if self._holds_all:
            return Interpreter(plan, None, stages, self._transfers, watch)
        axis, (device, *_) = self.world.pipeline, self.devices.values()
        return Interpreter(plan, axis.rank, stages, Messages(plan, axis, device, self._shelves), watch)

    def _call(self, stage: int) -> Callable[[int, Tensors], Any]:
        """Returns what calls one layer after another, each with random numbers of its own."""
        layers, device = self._layers[stage], self.devices[stage]

        def call(micro_batch: int, inputs: Tensors) -> Any:
            given: Any = unpacked(inputs)
            for number, layer in layers:
                self.draws.at(micro_batch, number, device)
                given = layer(given)
            return given

        return call

    @property
    def nothing(self) -> nn.Parameter:
        """What an optimizer is given of stages without parameters."""
        return self._nothing[0]

    @property
    def last(self) -> int:
        """The position on the pipeline of the rank that has the last stage."""
        return self._holder(-1)

    def _holder(self, stage: int) -> int:
        return 0 if self._holds_all else self._placement[stage]

    def step(self, batch: Sequence[Any]) -> Tensor:
        """Adds a batch's gradients to the parameters'; returns its loss, the same on every rank of the world.

        Collective: every rank must call it, those of one replica with the same batch.

        Within a loop over :func:`samestep.shards`, the loss is the micro-batch's part of the step's, to which those of
        all micro-batches and replicas add up, as `Shards.mean` has it; gradients are added up over the replicas with
        the last micro-batch of the step. Elsewhere each call is a step of its own.

        Args:
            batch: inputs and targets, on any device; of all tensors in it dim 0 runs over the samples.

        Returns:
            The mean loss, 0-dim, float64, on the host.

        Raises:
            DataError: the tensors have not as many samples, or the batch has none and no loop over shards gave it.
        """
        (inputs, targets), mean = split(batch), self.world.step.mean
        samples = samples_of(batch)
        cuts = self._cut(samples, nothing=mean is not None)
        roll = self._roll.call(inputs, targets, cuts, trains=True)
        weights, total = self._losses.weights(batch, cuts)
        targets = self._brought(targets, len(self._placement) - 1)

        def lose(number: int) -> Lose:
            wanted = slice_batch(targets, *cuts[number])
            return lambda outputs: self._losses.part(outputs, wanted, weights[number], total)

        with self._watched(len(cuts), samples):
            self._reduction.begin()
            with self.draws.step():
                losses = self._run(self._training, inputs, cuts, roll, lose)
            self._reduction.end()
            share = self._share(losses)
            if mean is not None:
                mean.add(share)
            if self.world.data.size > 1:
                dist.all_reduce(share, group=self.world.data.control)
        return share[0]

    def _watched(self, count: int, samples: int) -> AbstractContextManager[None]:
        return self._watch.step(self._plans(count), samples) if count else nullcontext()

    def report(self) -> PipelineReport:
        """Returns what the last steps took, what was predicted, and where the time went; the same on every rank.

        Collective over the pipeline: every rank of the replica must call it. Up to 50 steps are kept.

        Raises:
            StepError: no step was taken.
        """
        return reported(self.world, self._watch.steps(), self._foreseen)

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
        cuts = self._cut(samples_of(inputs), nothing=False)
        roll = self._roll.call(inputs, None, cuts, trains=False)
        given = self._run(self._forwards, inputs, cuts, roll, None)
        return told(self.world.pipeline, self.last, given, self.world.device)

    def _cut(self, samples: int, *, nothing: bool) -> list[tuple[int, int]]:
        if not samples and not nothing:
            raise DataError("the batch has no sample")
        count = self.micro_batches if self.split_size is None else -(-samples // self.split_size)
        return cut_evenly(samples, min(count, samples)) if samples else []

    def _brought(self, batch: Any, stage: int) -> Any:
        """Returns what the user gives on the device of a stage, if it is here."""
        return self._transfers.brought(batch, stage) if stage in self.parts else batch

    def _run(
        self,
        interpreters: Callable[[int], Interpreter],
        inputs: Sequence[Any],
        cuts: Cuts,
        roll: Roll,
        lose: Callable[[int], Lose] | None,
    ) -> list[Tensors]:
        if not cuts:  # the replicas beside have all that is left of an epoch
            roll.hear()
            return []

        def given(number: int) -> Tensors:
            return self._brought(tuple(slice_batch(each, *cuts[number]) for each in inputs), 0)  # type: ignore[no-any-return]

        return interpreters(len(cuts)).run(given, lose, roll)

    def _share(self, losses: list[Tensors]) -> Tensor:
        """Returns the replica's share of the loss, from the rank of the last stage. Collective over the pipeline."""
        share = torch.zeros(1, dtype=torch.float64)
        for (each,) in losses:
            share += each.double().cpu()
        axis = self.world.pipeline
        if axis.size > 1:
            dist.broadcast(share, axis.ranks[self.last], group=axis.control)
        return share

    def sync_buffers(self) -> None:
        """Makes buffers equal on all replicas. Collective: all call it."""
        sync_buffers(self, self.world.data)

    def release(self) -> None:
        """Lets go of the memory and groups that are shared with other ranks; the world calls it when it closes."""
        self._reduction.release()
        for shelf in self._shelves.values():
            shelf.leave()

    def gradient_norms(self, norm_type: float = 2.0) -> list[Tensor]:
        """Returns the norm of each gradient of the whole model, in its order. Collective over the pipeline."""
        own = {
            name: torch.linalg.vector_norm(parameter.grad, norm_type)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and name not in self.aliases
        }
        axis = self.world.pipeline
        names = [name for told in all_gather_json(axis, list(own)) for name in told]
        norms = dict(zip(names, torch.cat(all_gather_tensors(axis, on_host(list(own.values())))), strict=True))
        return [norms[name] for name in self.whole.parameters if name in norms]

    def gathered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what all ranks of the pipeline have, under its names, on the host of each. Collective over it.

        Args:
            own: what this rank has, under names that no other rank uses.
        """
        return gathered(self.world.pipeline, own)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Returns the state of the whole model, on the host of every rank: what an unsplit one loads.

        Collective over the pipeline: every rank of the replica must call it.
        """
        own = {name: each for name, each in self.state_dict().items() if name not in self.aliases}
        found = self.gathered(own)
        return {name: found[self.aliases.get(name, name)] for name in self.whole.state}

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
        beside = [name for name in state_dict if name not in self.whole.state]
        if strict and (missing or beside):
            what = f"lacks {', '.join(missing[:6])}" if missing else f"has {', '.join(beside[:6])}, which it has not"
            raise RuntimeError(f"the state {what}: it is not that of this model")
        for part in self.parts.values():
            mine = {name: state_dict[name] for name in part.state_dict() if name in state_dict}
            part.load_state_dict(mine, strict=strict, assign=assign)
        return _IncompatibleKeys(missing, beside)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters under the names that they have in the model."""
        for part in self.parts.values():
            yield from part.named_parameters(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields them; where these stages have none, one without a value, which an optimizer needs to be made."""
        yield from list(super().parameters(recurse)) or [self.nothing]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """DistributedDataParallel asks for it: it would send stage 0's parameters to the other stages."""
        raise ModelError(BY_ITSELF)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's buffers likewise."""
        for part in self.parts.values():
            yield from part.named_buffers(*args, **kwargs)
