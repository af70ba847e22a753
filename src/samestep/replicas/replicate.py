"""`replicate`: a model held by every rank, its gradients averaged when the step ends, and only then.

DistributedDataParallel is the engine: buckets in reverse order of the parameters, reduced while backward goes on.
Around it this file fixes what trips its users:

    no_sync() around the backward alone does nothing, because DDP decides in forward    decided from the step, and
    a second backward of one forward is not synchronised, without a word                  again at every backward
    a layer that is frozen or unfrozen later goes without, or raises                    noticed at the next forward
    names begin with `module.`                                                          state_dict is the bare model's
    buffers are broadcast in every forward: uneven evaluation hangs, a GAN's second     never in forward; BatchNorm is
      forward breaks the first one's backward, BatchNorm differs from one process         synchronised instead
    its reducer outlives the process group, and the process never ends                  let go when the world closes

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import nn

from samestep.compress import Codec
from samestep.data.batches import tensors_of
from samestep.errors import DataError, EmptyBatchError, SamestepError, StepError, UsageError
from samestep.launch.failure import lost_peer
from samestep.replicas import asked
from samestep.replicas.buckets import BucketPlan
from samestep.replicas.buffers import equalise, sync_buffers
from samestep.replicas.compression import GradientCompression
from samestep.replicas.drift import DriftGuard, DriftMonitor, guard_of
from samestep.replicas.local_steps import LocalSteps
from samestep.replicas.nonfinite import POLICIES, Guard, Policy
from samestep.replicas.norm import synchronise_batchnorm
from samestep.replicas.reduction import WAYS, Reduce
from samestep.replicas.synchroniser import Synchroniser
from samestep.replicas.virtual import VirtualRankEngine
from samestep.runtime.world import World

__all__ = ["Replica", "replicate"]

Engine = Synchroniser | VirtualRankEngine | LocalSteps
BatchNormMode = Literal["synchronised", "local"]

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
    nonfinite: Guard | None = None
    drift: DriftMonitor | None = None
    compression: GradientCompression | None = None
    _plan: BucketPlan | None = None  # of an engine that is released

    def __init__(self, module: nn.Module, world: World, batchnorm: str, synchroniser: Engine | None) -> None:
        super().__init__()
        self.module = module
        self.world = world
        self.batchnorm = batchnorm
        self.number = world.next_copy() if synchroniser is None and _needs_engine(world) else world.next_number()
        # past nn.Module's registration: the engine in it holds `module` too, and every parameter would be listed twice
        self.__dict__["_synchroniser"] = synchroniser
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]
        world.hold(self)

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
            synchronised = self._synchronised()
            if self.nonfinite is not None:
                self.nonfinite.note_inputs(args, kwargs)
            return synchronised(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            empty = any(tensor.dim() and not len(tensor) for tensor in tensors_of([args, kwargs]))
            if empty and not isinstance(error, SamestepError) and not lost_peer(error):
                raise EmptyBatchError(_empty_batch(self.module, self.world.rank, error)) from error
            if isinstance(error, ValueError) and _ONE_VALUE in str(error) and not isinstance(error, SamestepError):
                raise DataError(self._too_few(str(error).rpartition("input size ")[2])) from error
            raise

    def _too_few(self, shape: str) -> str:
        hint, each = self.world.step.small_batch_hint, "rank" if self.world.virtual is None else "virtual rank"
        return (  # without a rank, so that all say the same
            f"BatchNorm takes the statistics of each {each} by itself, of more than one value per channel, and got an "
            f"input of {shape}: {'take larger batches' if hint is None else hint()}"
        )

    def _synchronised(self) -> Engine:
        self.world.check_open()
        synchroniser: Engine | None = self.__dict__["_synchroniser"]
        if synchroniser is None:
            raise StepError(
                f"this {type(self.module).__name__} is a copy of a replica, whose gradients nobody averages: train "
                "samestep.replicate(copy.module, world) instead, or use it under torch.no_grad()"
            )
        return synchroniser

    def sync_buffers(self) -> None:
        """Makes buffers equal on all ranks, and parameters where ranks step by themselves. Collective: all call it."""
        self.average()
        if (slices := self.slices) is not None:
            slices.buffers.equalise()
        else:
            sync_buffers(self.module, self.world.data)

    @property
    def slices(self) -> VirtualRankEngine | None:
        """What holds the virtual ranks' gradients and buffers; None without virtual ranks."""
        engine = self.__dict__["_synchroniser"]
        return engine if isinstance(engine, VirtualRankEngine) else None

    @property
    def buckets(self) -> BucketPlan | None:
        """What was found out about bucket sizes, and which were chosen."""
        engine = self.__dict__["_synchroniser"]
        return engine.plan if isinstance(engine, Synchroniser) else self._plan

    def average(self) -> None:
        """Makes all ranks' parameters, and optimizer state, their mean; nothing where gradients are averaged.

        Before the end of a training with `average_every` that neither evaluates nor saves. Collective: every rank must
        call it.
        """
        if isinstance(engine := self.__dict__["_synchroniser"], LocalSteps):
            engine.average(state=True)

    def release(self) -> None:
        """Lets go of the process group, when the world closes."""
        engine, self._plan = self.__dict__["_synchroniser"], self.buckets
        if engine is not None:
            engine.release()
        if self.drift is not None:
            self.drift.release()
        self.__dict__["_synchroniser"] = None

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


def _empty_batch(module: nn.Module, rank: int, error: Exception) -> str:
    return (
        f"{type(module).__name__} refused the empty batch of rank {rank}, which has no sample in this micro-batch: "
        f"{str(error).splitlines()[0]}. Reshape without guessing a size: x.flatten(1) instead of x.view(x.size(0), -1)"
    )


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
            tries the sizes that should end earliest, and keeps them where they are quicker: `print(model.buckets)`.
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
            `samestep bench compress` tells whether it is quicker on this network, and `docs/compression.md` more. What
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
    asked.check_model(model, world, Replica)
    mode = asked.batchnorm_mode(model, world, batchnorm)
    buckets = asked.chosen_buckets(buckets, free=reduce is None and compress is None and average_every is None)
    asked.check_buckets(buckets)
    if reduce is not None and reduce not in WAYS:
        raise UsageError(f"reduce={reduce!r} is unknown: use 'shared', 'ordered' or 'gloo', or leave it out")
    if nonfinite is not None and nonfinite not in POLICIES:
        raise UsageError(f"nonfinite={nonfinite!r} is unknown: use 'stop', 'skip', 'warn' or 'off'")
    codec = asked.codec(compress, world, buckets, reduce)
    asked.check_average(average_every, world, codec)
    if (drift := guard_of(guard)) is not None and average_every is not None:
        raise UsageError("with average_every ranks hold weights of their own between averages: leave guard out")
    if mode == "synchronised":
        model = synchronise_batchnorm(model, world.data, world.device)
    finite = Guard(model, world, nonfinite)
    compression = None if codec is None else GradientCompression(model, codec, world.seed or 0)
    engine = _engine(model, world, finite, compression, average_every, buckets, reduce, find_unused_parameters)
    world.set_streams_apart()
    replica = Replica(model, world, mode, engine)
    replica.nonfinite, replica.compression = finite, compression
    finite.number, finite.slices = replica.number, replica.slices
    if drift is not None:
        replica.drift = DriftMonitor(model, world, drift)
        world.step.epoch_ends.append(replica.drift.end_epoch)
    return replica


def _needs_engine(world: World) -> bool:
    return world.data.size > 1 or world.virtual is not None


def _engine(
    model: nn.Module,
    world: World,
    guard: Guard,
    compression: GradientCompression | None,
    average_every: int | None,
    buckets: float | Literal["auto"] | None,
    reduce: Reduce | None,
    find_unused_parameters: bool,
) -> Engine | None:
    """Returns what makes one training of the ranks'; None where there is nobody else. Collective."""
    if world.virtual is not None:
        return VirtualRankEngine(model, world, world.virtual)
    if world.data.size == 1:
        return None
    sync_buffers(model, world.data)  # DDP sends rank 0's parameters
    if average_every is not None:
        equalise(list(model.parameters()), world.data)
        guard.local = None  # a rank's own gradients are all there are
        return LocalSteps(model, world, average_every)
    return Synchroniser(
        model,
        world,
        buckets=buckets,
        reduce=reduce,
        find_unused_parameters=find_unused_parameters,
        local=guard.local,
        compression=compression,
    )
