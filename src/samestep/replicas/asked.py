"""What `replicate` may be asked for: refused here where it makes no sense, with what to ask for instead."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from samestep.compress import Codec, named
from samestep.errors import DeviceError, ModelError, UsageError
from samestep.launch.warning import warn
from samestep.rankenv import variable
from samestep.runtime.world import World

__all__: list[str] = []


def batchnorm_mode(model: nn.Module, world: World, asked: str | None) -> str:
    mode = asked or "synchronised"
    if mode not in ("synchronised", "local"):
        raise ModelError(f"batchnorm={asked!r} is unknown: use 'synchronised' (the default) or 'local'")
    if mode == "synchronised" and world.virtual is not None and any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has BatchNorm, and virtual ranks are computed one after another, so statistics "
            "over all of them are not available: replicate(model, world, batchnorm='local') takes each slice's own"
        )
    return mode


def codec(asked: str | Codec | None, world: World, buckets: object, reduce: object) -> Codec | None:
    """Returns the codec, None without one; on one rank it has nothing to do, and that is said."""
    if asked is None:
        return None
    codec = named(asked)
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


def chosen_buckets(buckets: float | Literal["auto"] | None, *, free: bool) -> float | Literal["auto"] | None:
    """Returns what was asked for; else, where the choice is free, what `samestep run --settings` has brought."""
    brought = variable("SAMESTEP_BUCKETS")
    return float(brought) if buckets is None and free and brought else buckets


def check_buckets(buckets: object) -> None:
    is_number = isinstance(buckets, (int, float)) and not isinstance(buckets, bool)
    if buckets is None or buckets == "auto" or (is_number and 0 < buckets < math.inf):  # type: ignore[operator]
        return
    raise UsageError(
        f"buckets={buckets!r} is no bucket size: give MiB above 0, such as 25, or 'auto' to have them chosen, or leave "
        "it out"
    )


def check_model(model: nn.Module, world: World, *wrappers: type[nn.Module]) -> None:
    if isinstance(model, nn.DataParallel):
        raise ModelError(
            "nn.DataParallel drives many GPUs from one process, slowly and with other BatchNorm statistics. Instead: "
            "model = samestep.replicate(model.module.to(world.device), world), started with `samestep run -n auto`"
        )
    _ = getattr(model, "_ddp_params_and_buffers_to_ignore", None)  # a pipeline's refuses
    if isinstance(model, (DistributedDataParallel, *wrappers)):
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
