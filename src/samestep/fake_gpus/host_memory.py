"""Tensors whose device is a GPU for all of PyTorch and whose bytes lie in host memory.

PyTorch keeps the device of a tensor in C++, where autograd, DistributedDataParallel and the dispatcher read it; a
Python attribute would not reach them. DLPack does: it passes memory together with a device, and PyTorch takes over
that device. So a CPU tensor becomes one on `cuda:1` that shares its bytes, and back, without a copy.

What PyTorch does instead: FakeTensor keeps the device in Python and has no values at all.
"""

from __future__ import annotations

import ctypes

import torch

DEVICE = 8  # where a DLTensor has its device: behind a pointer; int32 type, int32 index
CPU, CUDA = 1, 2  # DLPack's numbers

_export = torch._C._to_dlpack  # noqa: SLF001
_take = torch._C._from_dlpack  # noqa: SLF001
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_word = ctypes.c_int64.from_address


def to_fake(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Returns a tensor on GPU `index` that shares the bytes of a CPU tensor."""
    capsule = _export(tensor)
    _word(_pointer(capsule, b"dltensor") + DEVICE).value = CUDA | index << 32
    return _take(capsule)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor that shares the bytes of a fake GPU's tensor."""
    capsule = _export(tensor)
    _word(_pointer(capsule, b"dltensor") + DEVICE).value = CPU
    return _take(capsule)
