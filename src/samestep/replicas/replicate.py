"""`replicate`: a model held by every rank, its gradients averaged when the step ends, and only then.

DistributedDataParallel is the engine: buckets in reverse order of the parameters, reduced while backward goes on.
Around it this file mends what trips its users:

    no_sync() around the backward alone does nothing, because DDP decides in forward    decided here, from the step
    names begin with `module.`                                                          state_dict is the bare model's
    buffers are broadcast in every forward: uneven evaluation hangs, a GAN's second     never in forward; BatchNorm is
      forward breaks the first one's backward, BatchNorm differs from one process         synchronised instead
    its reducer outlives the process group, and the process never ends                  let go when the world closes

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.data.batches import tensors_of
from samestep.errors import DeviceError, EmptyBatchError, ModelError
from samestep.replicas.buffers import equalise_buffers
from samestep.replicas.norm import synchronise_batchnorm
from samestep.runtime import seeds
from samestep.runtime.world import World

__all__ = ["Replica", "replicate"]

# torch 2.13 renamed the argument; both mean: no buffer travels in forward
_SPELLING = "forward_sync_buffers"
_KNOWN = _SPELLING in inspect.signature(DistributedDataParallel.__init__).parameters
_WITHOUT_BUFFERS: dict[str, Any] = {_SPELLING if _KNOWN else "broadcast_buffers": False}

BatchNormMode = Literal["synchronised", "local"]


class Replica(nn.Module):
    """One rank's copy of a model. Made by :func:`samestep.replicate`; call it in the model's place.

    `state_dict`, `named_parameters` and their like are the bare model's, without a prefix, so that what is saved on
    many ranks loads on one.

    Attributes:
        module: the bare model.
        world: the world that it is replicated over.
        batchnorm: "synchronised" or "local".
    """

    module: nn.Module

    def __init__(self, module: nn.Module, engine: DistributedDataParallel | None, world: World, batchnorm: str) -> None:
        super().__init__()
        self.module = module
        self.world = world
        self.batchnorm = batchnorm
        # past nn.Module's registration: the engine holds `module` too, and every parameter would be listed twice
        self.__dict__["_engine"] = engine
        world.hold(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; gradients are averaged in the backward of the micro-batch that ends the step."""
        engine: DistributedDataParallel | None = self.__dict__["_engine"]
        call: Any = self.module
        if engine is not None and torch.is_grad_enabled():
            engine.require_backward_grad_sync = self.world.step.step_ends and self._learns()
            call = engine
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if any(tensor.dim() and not len(tensor) for tensor in tensors_of([args, kwargs])):
                raise EmptyBatchError(_empty_batch(self.module, self.world.rank, error)) from error
            raise

    def _learns(self) -> bool:
        """Whether any parameter wants a gradient just now; a frozen discriminator must not wait for its own."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def equalise_buffers(self) -> None:
        """Makes buffers equal on all ranks, where local BatchNorm let them differ. Collective: every rank calls it."""
        equalise_buffers(self.module, self.world.data)

    def release(self) -> None:
        """Lets go of the process group; afterwards forward is the bare model's."""
        self.__dict__["_engine"] = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the bare model's state, without prefixes."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the bare model's state."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yields the bare model's parameters under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Yields the bare model's buffers under its own names."""
        return self.module.named_buffers(*args, **kwargs)


def _empty_batch(module: nn.Module, rank: int, error: RuntimeError) -> str:
    return (
        f"{type(module).__name__} refused the empty batch of rank {rank}, which has no sample in this micro-batch: "
        f"{str(error).splitlines()[0]}. Reshape without guessing a size: x.flatten(1) instead of x.view(x.size(0), -1)"
    )


def replicate(
    model: nn.Module,
    world: World,
    *,
    buckets: float | None = None,
    batchnorm: BatchNormMode | None = None,
    find_unused_parameters: bool = False,
) -> Replica:
    """Returns the model as one replica of many, whose gradients are averaged over `world.data` when a step ends.

    Rank 0's parameters and buffers are sent to all. From then on the global random generators differ from rank to
    rank, so that dropout does; until then they are alike, so that models start alike.

    Collective: every rank must call it.

    Args:
        model: on `world.device`, with at least one trainable parameter. Its BatchNorm layers are replaced.
        world: the world.
        buckets: size of a gradient bucket in MiB; DistributedDataParallel's 25 by default.
        batchnorm: "synchronised" (the default) takes statistics over the whole micro-batch of all ranks, as one
            process would: exact, at two small reductions a layer. "local" takes each rank's own, which is another
            training; buffers then become equal at evaluation and when saved.
        find_unused_parameters: for models that leave parameters out of some forwards; costs a walk of the graph.

    Raises:
        ModelError: nothing to train, or the model is wrapped in DataParallel or DistributedDataParallel.
        DeviceError: the model is on another device than the rank's.

    Example:
        >>> import samestep, torch
        >>> with samestep.world() as world:
        ...     model = samestep.replicate(torch.nn.Linear(2, 1).to(world.device), world)
        ...     list(model.state_dict())
        ['weight', 'bias']
    """
    _check_model(model, world)
    mode = batchnorm or "synchronised"
    if mode not in ("synchronised", "local"):
        raise ModelError(f"batchnorm={batchnorm!r} is unknown: use 'synchronised' (the default) or 'local'")
    if mode == "synchronised":
        model = synchronise_batchnorm(model, world.data, world.device)
    engine = _engine(model, world, buckets, find_unused_parameters=find_unused_parameters)
    if world.seed is not None:
        seeds.seed_everything(world.seed, "step", world.data.rank)
    return Replica(model, engine, world, mode)


def _engine(
    model: nn.Module, world: World, buckets: float | None, *, find_unused_parameters: bool
) -> DistributedDataParallel | None:
    if world.data.group is None:
        return None
    _send_buffers(model, world)
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.data.group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=buckets,
        find_unused_parameters=find_unused_parameters,
        **_WITHOUT_BUFFERS,
    )


def _send_buffers(model: nn.Module, world: World) -> None:
    """DDP sends the parameters; buffers only if it may go on sending them in every forward (before torch 2.13)."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=world.data.ranks[0], group=world.data.group)


def _check_model(model: nn.Module, world: World) -> None:
    if isinstance(model, nn.DataParallel):
        raise ModelError(
            "nn.DataParallel drives many GPUs from one process, slowly and with other BatchNorm statistics. Instead: "
            "model = samestep.replicate(model.module.to(world.device), world), started with `samestep run -n auto`"
        )
    if isinstance(model, (DistributedDataParallel, Replica)):
        raise ModelError(f"the model is wrapped in {type(model).__name__} already: replicate(model.module, world)")
    trainable = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
    if not trainable:
        raise ModelError(f"{type(model).__name__} has no trainable parameter: there is no gradient to average")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device != world.device:
            raise DeviceError(
                f"{name} is on {tensor.device}, but rank {world.rank} trains on {world.device}: call "
                f"model.to(world.device) before replicate"
            )
