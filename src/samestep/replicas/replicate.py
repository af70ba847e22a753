"""`replicate`: a model held by every rank, its gradients averaged when the step ends, and only then.

DistributedDataParallel is the engine. Around it, in this file and in `ddp_engine`: whether a backward synchronises is
decided from the step, again at every backward; a layer that is frozen or unfrozen is noticed at the next forward;
state_dict is the bare model's; buffers are never broadcast in forward, and BatchNorm is synchronised instead; the
reducer is released when the world closes.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from samestep.compress import Codec, named
from samestep.data.batches import first_samples, tensors_of
from samestep.errors import DataError, DeviceError, EmptyBatchError, ModelError, SamestepError, StepError, UsageError
from samestep.launch.rank.failure import lost_peer
from samestep.launch.rank.user_code import warn
from samestep.rankenv import variable
from samestep.replicas.batchnorm import synchronise_batchnorm
from samestep.replicas.bucket_plan import BucketPlan
from samestep.replicas.buffers import broadcast_tensors, sync_buffers
from samestep.replicas.compression import GradientCompression
from samestep.replicas.ddp_engine import DDPEngine
from samestep.replicas.drift import DriftGuard, DriftMonitor, guard_of
from samestep.replicas.local_sgd import LocalSGDEngine
from samestep.replicas.nonfinite import POLICIES, NonFiniteGuard, Policy
from samestep.replicas.reduction import METHODS, Reduce
from samestep.replicas.virtual_engine import VirtualRankEngine
from samestep.runtime.rng import preserve_rng
from samestep.runtime.world import World

__all__ = ["Replica", "replicate"]

Engine = DDPEngine | VirtualRankEngine | LocalSGDEngine
BatchNormMode = Literal["synchronised", "local"]

REFUSALS = (RuntimeError, IndexError, ValueError)  # how models refuse shapes
_ONE_VALUE = "Expected more than 1 value per channel when training"  # how torch's batch_norm says it


class Replica(nn.Module):
    """One rank's copy of a model. Made by :func:`samestep.replicate`; call it in the model's place.

    `state_dict`, `named_parameters` and their like are the bare model's, without a prefix, so that what is saved on
    many ranks loads on one. A deep copy is for averaging and evaluating; to train it, replicate it.

    Attributes:
        module: the bare model.
        world: the world that it is replicated over.
        batchnorm: "synchronised" or "local".
        number: the same on every rank; models are numbered as they are replicated. Of a copy it is negative.
        nonfinite: watches its gradients for NaN and Inf, and counts the steps that it leaves out; None for a copy.
        drift: compares its weights with those of the other ranks; None where nobody asked for it.
        compression: of its gradients: the codec, and how many bytes were sent; None without one.
        buckets: what was found out about bucket sizes; `print` shows a table. None without `buckets="auto"`, before it
            is decided, and where there is nothing to decide.
    """

    module: nn.Module
    nonfinite: NonFiniteGuard | None = None
    drift: DriftMonitor | None = None
    compression: GradientCompression | None = None
    _tried_empty = False  # whether the model takes an empty batch
    _plan: BucketPlan | None = None  # of an engine that is released

    def __init__(self, module: nn.Module, world: World, batchnorm: str, engine: Engine | None) -> None:
        super().__init__()
        self.module = module
        self.world = world
        self.batchnorm = batchnorm
        self.number = world.next_copy_id() if engine is None and _needs_engine(world) else world.next_id()
        # past nn.Module's registration: the engine in it holds `module` too, and every parameter would be listed twice
        self.__dict__["_engine"] = engine
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]
        world.register(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; gradients are averaged in the backward of the micro-batch that ends the step.

        Raises:
            StepError: gradients are wanted after the world was closed, or of a deep copy.
            EmptyBatchError: the model cannot take the empty batch of a rank without samples.
            DataError: BatchNorm's own statistics of one rank, or virtual rank, would be of a single value.
        """
        try:
            if not torch.is_grad_enabled() or not _needs_engine(self.world):
                return self.module(*args, **kwargs)
            if not self._tried_empty and (later := self.world.step.empty_later) is not None:
                # raises on all ranks, at the first step, what one of them would at the end of the epoch
                self._tried_empty = True
                if (refused := try_empty(self.module, args, kwargs, later[1], self.world.device)) is not None:
                    raise EmptyBatchError(refusal(self.module, refused, later[0])) from refused
            synchronised = self._training_engine()
            if self.nonfinite is not None:
                self.nonfinite.note_inputs(args, kwargs)
            return synchronised(*args, **kwargs)
        except REFUSALS as error:
            empty = any(tensor.dim() and not len(tensor) for tensor in tensors_of([args, kwargs]))
            if empty and not isinstance(error, SamestepError) and not lost_peer(error):
                where = f"rank {self.world.rank} has no sample in this micro-batch"
                raise EmptyBatchError(refusal(self.module, error, where)) from error
            if isinstance(error, ValueError) and _ONE_VALUE in str(error) and not isinstance(error, SamestepError):
                raise DataError(self._too_few(str(error).rpartition("input size ")[2])) from error
            raise

    def _too_few(self, shape: str) -> str:
        hint, each = self.world.step.small_batch_hint, "rank" if self.world.virtual is None else "virtual rank"
        return (  # without a rank, so that all say the same
            f"BatchNorm takes the statistics of each {each} by itself, of more than one value per channel, and got an "
            f"input of {shape}: {'take larger batches' if hint is None else hint()}"
        )

    def _training_engine(self) -> Engine:
        self.world.check_open()
        engine: Engine | None = self.__dict__["_engine"]
        if engine is None:
            raise StepError(
                f"this {type(self.module).__name__} is a copy of a replica, whose gradients nobody averages: train "
                "samestep.replicate(copy.module, world) instead, or use it under torch.no_grad()"
            )
        return engine

    def sync_buffers(self) -> None:
        """Makes buffers equal on all ranks, and parameters where ranks step by themselves. Collective: all call it."""
        self.average()
        if (slices := self.slices) is not None:
            slices.buffers.sync()
        else:
            sync_buffers(self.module, self.world.data)

    @property
    def slices(self) -> VirtualRankEngine | None:
        """What holds the virtual ranks' gradients and buffers; None without virtual ranks."""
        engine = self.__dict__["_engine"]
        return engine if isinstance(engine, VirtualRankEngine) else None

    @property
    def buckets(self) -> BucketPlan | None:
        """What was found out about bucket sizes, and which were chosen."""
        engine = self.__dict__["_engine"]
        return engine.plan if isinstance(engine, DDPEngine) else self._plan

    def average(self) -> None:
        """Makes all ranks' parameters, and optimizer state, their mean; nothing where gradients are averaged.

        Before the end of a training with `average_every` that neither evaluates nor saves. Collective: every rank must
        call it.
        """
        if isinstance(engine := self.__dict__["_engine"], LocalSGDEngine):
            engine.average(state=True)

    def release(self) -> None:
        """Lets go of the process group, when the world closes."""
        engine, self._plan = self.__dict__["_engine"], self.buckets
        if engine is not None:
            engine.release()
        if self.drift is not None:
            self.drift.release()
        self.__dict__["_engine"] = None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yields the bare model's parameters under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Yields the bare model's buffers under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replica:
        return Replica(copy.deepcopy(self.module, memo), self.world, self.batchnorm, None)


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG001
    """Takes `module.` out of the names, also where the replica is part of a larger model."""
    _rename(state, prefix + "module.", prefix)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # noqa: ARG001
    """Puts `module.` in again, before the children look for their names."""
    _rename(state, prefix, prefix + "module.")


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    for name in [name for name in state if name.startswith(old)]:
        state[new + name.removeprefix(old)] = state.pop(name)


def replicate(
    model: nn.Module,
    world: World,
    *,
    buckets: float | Literal["auto"] | None = None,
    reduce: Reduce | None = None,
    batchnorm: BatchNormMode | None = None,
    find_unused_parameters: bool = False,
    nonfinite: Policy | None = None,
    compress: str | Codec | None = None,
    average_every: int | None = None,
    guard: int | DriftGuard | None = None,
) -> Replica:
    """Returns the model as one replica of many, whose gradients are averaged over `world.data` when a step ends.

    Rank 0's parameters and buffers are sent to all. From then on the global random generators differ from rank to
    rank, so that dropout does; until then they are alike, so that models start alike.

    Collective: every rank must call it.

    Args:
        model: on `world.device`, with at least one trainable parameter. Its BatchNorm layers are replaced.
        world: the world.
        buckets: size of a gradient bucket in MiB; by default DistributedDataParallel's 25, after a first one of 1.
            "auto" measures, in the first seventy steps, when gradients become ready and what an all-reduce takes,
            tries the sizes that should end earliest, and keeps them if they are faster: `print(model.buckets)`.
            The same gradients, bit for bit, wherever those do not depend on buckets; see `docs/buckets.md`. On a
            world of one and on virtual ranks there is nothing to choose.
        reduce: how the ranks' gradients are added. By default in shared memory where ranks on CPUs share a host, some
            7 times faster than through gloo, and between hosts over the backend; on GPUs over the backend. "gloo"
            leaves it to DistributedDataParallel and the backend, whatever that is. "shared" insists on shared memory.
            "ordered" adds in the order of the ranks, the same bits however the gradients are put into buckets: on one
            host as quick as "shared", which does so too; elsewhere slower than the backend.
        batchnorm: "synchronised" (the default) takes statistics over the whole micro-batch of all ranks, as one
            process would: exact, at two small reductions a layer. "local" takes each rank's own, which is another
            training; buffers then become equal at evaluation and when saved. On virtual ranks it is the only way.
        find_unused_parameters: for models that leave parameters out of some forwards; costs a walk of the graph.
        nonfinite: what happens, on all ranks alike, before an optimizer steps with a NaN or Inf in the gradients.
            "stop" raises and names rank and tensor, "skip" leaves the step out (neither parameters nor the optimizer's
            state change), "warn" goes on; each looks at every element, for two passes over the gradients a step. By
            default it stops, after a glance that costs next to nothing: of tensors with more than 131,072 elements it
            sees a row and a column. "off" does not look.
        compress: for slow links: gradients travel in fewer bytes, "fp16", "bf16", "int8", "sign", "topk" or "powersgd",
            or a codec of `samestep.compress` with settings. Another training, which converges where the codec suits it;
            `samestep bench compress` tells whether it is faster on this network, and `docs/compression.md` more. What
            a rank still owes is saved in checkpoints of the model. On a world of one it changes nothing.
        average_every: for links slower still: ranks step by themselves, and average their parameters every so many
            optimizer steps, before every evaluation and save, and in `model.average()` (local SGD). Another training,
            too; gradients are each rank's own, so `nonfinite` judges them rank by rank.
        guard: makes sure every so many optimizer steps that all ranks hold the same weights, bit for bit, and names
            rank and tensors where they do not: a number of steps, such as 16, or a `samestep.DriftGuard`, which can
            also warn or repair, look at optimizers' state, and send rank 0's weights to all every so many epochs.
            `model.drift` counts.

    Raises:
        ModelError: nothing to train, or the model is wrapped in DataParallel or DistributedDataParallel.
        UsageError: an argument is none of these, or shared memory is asked for and is not available.
        DeviceError: the model is on another device than the rank's.

    Example:
        >>> import samestep, torch
        >>> with samestep.world() as world:
        ...     model = samestep.replicate(torch.nn.Linear(2, 1).to(world.device), world)
        ...     list(model.state_dict())
        ['weight', 'bias']
    """
    check_model(model, world)
    mode = batchnorm_mode(model, world, batchnorm)
    brought = variable("SAMESTEP_BUCKETS")  # by `samestep run --settings`
    if brought and buckets is None and reduce is None and compress is None and average_every is None:
        buckets = float(brought)
    check_buckets(buckets)
    if reduce is not None and reduce not in METHODS:
        raise UsageError(f"reduce={reduce!r} is unknown: use 'shared', 'ordered' or 'gloo', or leave it out")
    if nonfinite is not None and nonfinite not in POLICIES:
        raise UsageError(f"nonfinite={nonfinite!r} is unknown: use 'stop', 'skip', 'warn' or 'off'")
    codec = choose_codec(compress, world, buckets, reduce)
    check_average(average_every, world, codec)
    if (drift := guard_of(guard)) is not None and average_every is not None:
        raise UsageError("with average_every ranks hold weights of their own between averages: leave guard out")
    if mode == "synchronised":
        model = synchronise_batchnorm(model, world.data, world.device)
    finite = NonFiniteGuard(model, world, nonfinite)
    compression = None if codec is None else GradientCompression(model, codec, world.seed or 0)
    engine: Engine | None = None
    if world.virtual is not None:
        engine = VirtualRankEngine(model, world, world.virtual)
    elif world.data.size > 1:
        sync_buffers(model, world.data)  # DDP sends rank 0's parameters
        if average_every is not None:
            broadcast_tensors(list(model.parameters()), world.data)
            finite.local = None  # a rank's own gradients are all there are
            engine = LocalSGDEngine(model, world, average_every)
        else:
            engine = DDPEngine(
                model,
                world,
                buckets=buckets,
                reduce=reduce,
                find_unused_parameters=find_unused_parameters,
                local=finite.local,
                compression=compression,
            )
    world.diverge_rng()
    replica = Replica(model, world, mode, engine)
    replica.nonfinite, replica.compression = finite, compression
    finite.number, finite.slices = replica.number, replica.slices
    if drift is not None:
        replica.drift = DriftMonitor(model, world, drift)
        world.step.epoch_ends.append(replica.drift.end_epoch)
    return replica


def _needs_engine(world: World) -> bool:
    return world.data.size > 1 or world.virtual is not None


def batchnorm_mode(model: nn.Module, world: World, requested: str | None) -> str:
    mode = requested or "synchronised"
    if mode not in ("synchronised", "local"):
        raise ModelError(f"batchnorm={requested!r} is unknown: use 'synchronised' (the default) or 'local'")
    if mode == "synchronised" and world.virtual is not None and any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has BatchNorm, and virtual ranks are computed one after another, so statistics "
            "over all of them are not available: samestep.replicate(model, world, batchnorm='local') takes those of "
            "each virtual rank by itself, as DistributedDataParallel does on as many processes"
        )
    return mode


def choose_codec(requested: str | Codec | None, world: World, buckets: object, reduce: object) -> Codec | None:
    """Returns the codec, None without one; on one rank it has nothing to do, and that is said."""
    if requested is None:
        return None
    codec = named(requested)
    if reduce is not None or buckets == "auto":
        other = f"reduce={reduce!r}" if reduce is not None else "buckets='auto'"
        raise UsageError(f"compress has a way of its own to add gradients, and chunks of its own: leave {other} out")
    if world.virtual is not None:
        raise UsageError(
            "virtual ranks are for the same bits on any number of ranks, and what compress loses depends on it: leave "
            "one of them out"
        )
    if world.data.size == 1:
        warn(f"compress={codec.name} changes nothing on one rank, which sends no gradients")
    return codec


def check_average(every: object, world: World, codec: Codec | None) -> None:
    if every is None:
        return
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"average_every={every!r} is no number of steps: give a whole number, 1 or more")
    if codec is not None or world.virtual is not None:
        other = "virtual ranks add" if codec is None else "compress is about"
        raise UsageError(f"average_every leaves gradients where they are, and {other} gradients: leave one of them out")
    if world.data.size == 1:
        warn(f"average_every={every} changes nothing on one rank")


def check_buckets(buckets: object) -> None:
    is_number = isinstance(buckets, (int, float)) and not isinstance(buckets, bool)
    if buckets is None or buckets == "auto" or (is_number and 0 < buckets < math.inf):  # type: ignore[operator]
        return
    raise UsageError(
        f"buckets={buckets!r} is no bucket size: give MiB above 0, such as 25, or 'auto' to have them chosen, or leave "
        "it out"
    )


def check_model(model: nn.Module, world: World) -> None:
    if isinstance(model, nn.DataParallel):
        raise ModelError(
            "nn.DataParallel drives many GPUs from one process, slowly and with other BatchNorm statistics. Instead: "
            "model = samestep.replicate(model.module.to(world.device), world), started with `samestep run -n auto`"
        )
    _ = getattr(model, "_ddp_params_and_buffers_to_ignore", None)  # a pipeline's refuses
    if isinstance(model, DistributedDataParallel | Replica):
        raise ModelError(f"the model is wrapped in {type(model).__name__} already: replicate(model.module, world)")
    if not any(tensor.requires_grad for tensor in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no trainable parameter: there is no gradient to average")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device != world.device:
            raise DeviceError(
                f"{name} is on {tensor.device}, but rank {world.rank} trains on {world.device}: call "
                f"model.to(world.device) before replicate"
            )


def refusal(module: nn.Module, error: Exception, where: str) -> str:
    return (
        f"{type(module).__name__} cannot take an empty batch ({str(error).splitlines()[0].rstrip('.')}), and {where}: "
        "write x.flatten(1) instead of x.view(x.size(0), -1), or leave the short step out with drop_last=True"
    )


def try_empty(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int, device: torch.device
) -> Exception | None:
    """Returns what a model raises for a batch without samples; None if it accepts one, or if that is not known.

    A last step with fewer samples than ranks leaves some ranks an empty batch, and a model may refuse it: `view(0, -1)`
    does. So one is tried at the first step: by a forward of a copy that shares the parameters, without gradients,
    collectives or random numbers that are missed later. Nothing is concluded where the copy does not take a single
    sample either.

    `args` and `kwargs` are those of its forward for a batch of `samples`: the length of dim 0 of the tensors that hold
    a value for each.
    """
    inputs = {count: first_samples((tuple(args), dict(kwargs)), count, samples) for count in (1, 0)}

    def run(count: int) -> None:
        positional, named = inputs[count]
        trial(*positional, **named)

    with preserve_rng(device), torch.no_grad():
        try:
            trial = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
            for part in trial.modules():
                part._forward_hooks.clear()  # noqa: SLF001  (what they look at are the forwards of the training)
                part._forward_pre_hooks.clear()  # noqa: SLF001
                if isinstance(part, _BatchNorm):
                    part.training = False  # its statistics are a collective
            run(1)
        except Exception:  # noqa: BLE001  (a model that cannot be copied, or does not take one sample, is not judged)
            return None
        try:
            run(0)
        except Exception as error:  # noqa: BLE001
            return error if isinstance(error, REFUSALS) and not isinstance(error, SamestepError) else None
    return None
