"""Puts all parts of the fake GPUs in place, in this process and those that it spawns, and takes them away again."""

from __future__ import annotations

import multiprocessing.spawn
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import UsageError
from samestep.fake_gpus import devices
from samestep.fake_gpus.cuda import patch_cuda
from samestep.fake_gpus.generators import FakeGenerator
from samestep.fake_gpus.groups import patch_groups
from samestep.fake_gpus.kernels import Kernels
from samestep.fake_gpus.loading import patch_loading
from samestep.fake_gpus.models import patch_models
from samestep.fake_gpus.native import Native, set_index
from samestep.fake_gpus.notes import around, watch_imports
from samestep.instrument.patch import Patches

_native, _kernels, _patches = Native(), Kernels(), Patches()


def install(gpus: int) -> None:
    """Makes so many fake GPUs in this process, and in those that it spawns."""
    if devices.DEVICES.total:
        if devices.DEVICES.total != gpus:
            raise UsageError(f"there are {devices.DEVICES.total} fake GPUs in this process already, and not {gpus}")
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError("fake GPUs must be asked for before the first tensor on a real one")
    devices.forget(gpus)
    set_index(0)
    try:
        patch_cuda(_patches)  # asks torch for its configuration, which CUDA's hooks would be part of
        _native.install(gpus)
    except BaseException:
        remove()
        raise
    patch_loading(_patches)
    patch_models(_patches)
    if dist.is_available():
        patch_groups(_patches)
    _patches.set(torch, "Generator", _generator_class(torch.Generator))
    graph: Any = torch.autograd.graph
    run = graph._engine_run_backward  # noqa: SLF001
    _patches.exchange("torch", {run: _on_this_thread(run)})
    _patches.set(multiprocessing.spawn, "get_preparation_data", _preparing(multiprocessing.spawn.get_preparation_data))
    watch_imports(_patches)
    _kernels.install()


def remove() -> None:
    _kernels.remove()
    _patches.undo()
    _native.remove()
    devices.forget(0)


@around
def _on_this_thread(run: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Lets the backward pass run where it is called: the engine has threads for the devices of its first pass only."""
    with torch.autograd.set_multithreading_enabled(False):
        return run(*args, **named)


def _generator_class(base: Any) -> Any:
    class Meta(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, base)

        def __call__(cls, device: Any = "cpu") -> Any:
            device = torch.device(device)
            return base(device) if device.type != "cuda" else FakeGenerator(devices.check_index(device.index))

    return Meta("Generator", (), {"__doc__": base.__doc__, "__module__": "torch"})


class _Installer:
    """Installs the fake GPUs in a spawned process, when that unpickles its first argument."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    def __reduce__(self) -> Any:
        return install, (self.gpus,)


@around
def _preparing(original: Callable[..., Any], name: str) -> dict[str, Any]:
    return {"samestep_fake_gpus": _Installer(devices.DEVICES.total), **original(name)}
