"""Memory of fake GPUs outside of operators: storages, pinned memory, tensors sent to other processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.multiprocessing import reductions
from torch.utils._device import _device_constructors

from samestep.fake_gpus import devices
from samestep.fake_gpus.host_memory import to_fake
from samestep.fake_gpus.notes import around
from samestep.instrument.patch import Patches

MAKERS = ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "eye", "empty_strided", "tensor")
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
OF_DDP = ("/nn/parallel/distributed.py", "/torch/autograd/graph.py")  # the latter runs the backward pass
StorageWeakRef: Any = reductions.StorageWeakRef
_pinned: dict[int, Any] = {}  # by the address of the storage
_emptied: dict[int, Any] = {}  # likewise


def _pin(tensor: Tensor, _device: Any = None) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=False).copy_(tensor)
    for address in [address for address, storage in _pinned.items() if storage.expired()]:
        del _pinned[address]
    reference = StorageWeakRef(copy.untyped_storage())
    _pinned[reference.cdata] = reference
    return copy


def _is_pinned(tensor: Tensor, _device: Any = None) -> bool:
    if sys._getframe(1).f_code.co_filename.endswith(OF_DDP):  # noqa: SLF001
        return True  # DDP's C++ asks for what it has made pinned itself
    reference = _pinned.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
    return reference is not None and not reference.expired()


PINNING: dict[str, Callable[..., Any]] = {"_pin_memory": _pin, "is_pinned": _is_pinned}


def _pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of torch that pins what it makes where `pin_memory=True`."""

    def made(*args: Any, **named: Any) -> Any:
        return make(*args, **named).pin_memory() if named.pop("pin_memory", False) else make(*args, **named)

    made.__name__, made.__doc__, made.__module__ = make.__name__, make.__doc__, make.__module__
    return made


@around
def _new_storage(original: Callable[..., Any], cls: Any, *args: Any, device: Any = None, **named: Any) -> Any:
    if device is None:
        return original(cls, *args, **named)
    if torch.device(device).type != "cuda":
        return original(cls, *args, device=device, **named)
    index = devices.check_index(torch.device(device).index)
    given = args[0] if args else 0
    make = torch.empty if isinstance(given, int) else torch.tensor
    return to_fake(make(given, dtype=torch.uint8), index).untyped_storage()


@around
def _resize(original: Callable[..., Any], storage: Any, size: int) -> Any:
    if storage.device.type != "cuda":
        return original(storage, size)
    _emptied.pop(storage._cdata, None)  # noqa: SLF001
    if size > storage.nbytes():
        raise NotImplementedError("fake GPUs do not fake a storage that grows: make a new tensor")
    if size == 0:  # what FSDP does with parameters that it gathers again; the memory stays
        _emptied[storage._cdata] = StorageWeakRef(storage)  # noqa: SLF001
    return storage


@around
def _size(original: Callable[..., int], storage: Any) -> int:
    emptied = _emptied.get(storage._cdata) if _emptied else None  # noqa: SLF001
    return original(storage) if emptied is None or emptied.expired() else 0


def _rebuild(tensor: Tensor, device: torch.device, requires_grad: bool, kind: type[Tensor]) -> Tensor:
    moved = to_fake(tensor, devices.check_index(device.index))
    if issubclass(kind, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad)
    return moved.requires_grad_(requires_grad)


@around
def _reduce(original: Callable[..., Any], tensor: Tensor) -> Any:
    if tensor.device.type != "cuda" or (tensor.requires_grad and not tensor.is_leaf):
        return original(tensor)  # which refuses what is no leaf
    return _rebuild, (tensor.detach().cpu(), tensor.device, tensor.requires_grad, type(tensor))


def patch_loading(patches: Patches) -> None:
    """Lets storages be made on fake GPUs, memory be pinned, and tensors be sent."""
    builtins: Any = _builtins
    _device_constructors()  # (keeps torch's own functions, which its modes compare)
    for name in (*MAKERS, *LIKE):
        own = getattr(torch, name)
        made = _pinning(own)
        patches.set(torch, name, made)
        known = builtins._find_builtin(own)  # noqa: SLF001
        if known is not None:
            builtins._register_builtin(made, known)  # noqa: SLF001  (for TorchScript)
    patches.set(torch.UntypedStorage, "__new__", _new_storage(torch.UntypedStorage.__new__))
    patches.set(torch.UntypedStorage, "resize_", _resize(torch.UntypedStorage.resize_))
    for name in ("nbytes", "size"):
        patches.set(torch.UntypedStorage, name, _size(getattr(torch.UntypedStorage, name)))
    original = reductions.reduce_tensor
    reduce_tensor = _reduce(original)
    patches.set(reductions, "reduce_tensor", reduce_tensor)
    for kind in (Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, reduce_tensor)
        patches.on_undo(partial(ForkingPickler.register, kind, original))
