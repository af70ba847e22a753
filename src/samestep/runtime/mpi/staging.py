"""Tensors that MPI cannot read where they lie: on a GPU, or with gaps between their elements.

    GPU     ──copy──>  host  ──MPI──>  host  ──copy──>  GPU        a CUDA-aware MPI reads the GPU itself
    gaps    ──copy──>  dense ──MPI──>  dense ──copy──>  gaps

A collective is carried out by another thread than the one that issued it, while the GPU may still compute what it
shall send. So the place in the GPU's queue is noted when it is issued, and waited for before anything is read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__: list[str] = []


def is_direct(tensor: Tensor) -> bool:
    """Whether MPI can use the tensor's memory as it is."""
    return tensor.is_contiguous() and (tensor.device.type == "cpu" or (tensor.is_cuda and is_cuda_aware()))


def staged(tensor: Tensor) -> Tensor:
    """Returns the tensor's values where MPI can read and write them: itself, if that is possible."""
    plain = tensor.detach()
    if is_direct(plain):
        return plain
    return plain.contiguous() if plain.is_cuda and is_cuda_aware() else plain.to("cpu").contiguous()


def put_back(tensor: Tensor, values: Tensor) -> None:
    """Brings what MPI has written into a tensor, unless it was written there."""
    if values.data_ptr() != tensor.data_ptr() or values.device != tensor.device:
        tensor.detach().copy_(values.view_as(tensor))
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def noted(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Notes how far the GPUs' queues are; the returned call waits until they have come to that place."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def reached() -> None:
        for event in events:
            event.synchronize()

    return reached


@functools.cache
def is_cuda_aware() -> bool:
    """Whether the MPI library that is loaded says that it reads GPU memory by itself."""
    query = getattr(_library(), "MPIX_Query_cuda_support", None)
    return bool(query is not None and torch.cuda.is_available() and query())


def _library() -> ctypes.CDLL | None:
    """Returns the library among those that this process has loaded."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").split("\n")
    files = {line.split(maxsplit=5)[5] for line in lines if "/libmpi.so" in line}
    return ctypes.CDLL(min(files)) if files else None
