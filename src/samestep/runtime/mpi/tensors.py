"""PyTorch's types and operations in MPI's terms, and tensors that MPI cannot read where they lie.

MPI has no half types: those are added in float32 and rounded once. That takes twice the bytes; an operation of our own
over two-byte types would be called back from C for every few kilobytes. Booleans are added as "or" and multiplied as
"and", as PyTorch does elsewhere. Tensors on a GPU, or with gaps between their elements, are copied to dense host memory
and back; a CUDA-aware MPI reads the GPU itself.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UsageError

PIECE = 1 << 30  # bytes of one message: MPI counts in 32 bits

NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
HALVES = (torch.float16, torch.bfloat16)
OPERATIONS = {
    "sum": "SUM",
    "avg": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
OF_BOOL = {"sum": "LOR", "max": "LOR", "bor": "LOR", "product": "LAND", "min": "LAND", "band": "LAND", "bxor": "LXOR"}
BITWISE = ("band", "bor", "bxor")


def check_reducible(tensor: Tensor, op: str) -> None:
    """Raises UsageError where MPI has no `op` for such a tensor, and no wider type serves."""
    if tensor.layout is not torch.strided:
        raise UsageError("MPI adds dense tensors, and this one is sparse: pass it to a group of gloo's")
    floating = tensor.is_floating_point() or tensor.is_complex()
    known = tensor.dtype in NAMES or tensor.dtype in HALVES
    fits = op in (OF_BOOL if tensor.dtype is torch.bool else OPERATIONS)
    if known and fits and not (floating and op in BITWISE) and not (tensor.is_complex() and op in {"min", "max"}):
        return
    raise UsageError(f"MPI has no {op.upper()} of {str(tensor.dtype).removeprefix('torch.')} tensors")


def widened(tensor: Tensor) -> Tensor:
    """Returns the tensor in a type that MPI adds: itself, unless it is of a half type."""
    return tensor.to(torch.float32) if tensor.dtype in HALVES else tensor


def operation(mpi: Any, op: str, dtype: torch.dtype) -> Any:
    return getattr(mpi, OF_BOOL[op] if dtype is torch.bool else OPERATIONS[op])


def divide(tensor: Tensor, ranks: int) -> None:
    """Divides a sum by the ranks, in place; whole numbers are truncated, as PyTorch's other backends do."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(ranks)
    else:
        tensor.div_(ranks, rounding_mode="trunc")


def memory_of(mpi: Any, tensor: Tensor) -> Any:
    """Returns a tensor's memory as mpi4py takes it, to be read at once; the tensor must live until MPI is done."""
    if tensor.is_cuda:  # a CUDA-aware MPI reads it, and knows nothing of what is still being computed
        torch.cuda.current_stream(tensor.device).synchronize()
    if tensor.numel() == 0:
        return mpi.buffer.allocate(0)
    return mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def fits_one_message(tensor: Tensor) -> bool:
    return tensor.nbytes <= PIECE


def pieces(tensor: Tensor, limit: int | None = None) -> Iterator[Tensor]:
    """Yields the parts of a dense tensor, of at most `limit` bytes, that are one message each: none of an empty one."""
    flat = tensor.view(-1)
    each = max(1, min(limit or PIECE, PIECE) // tensor.element_size())
    for start in range(0, flat.numel(), each):
        yield flat[start : start + each]


def to_host(tensor: Tensor) -> Tensor:
    """Returns the tensor's values where MPI can read and write them: itself, if that is possible."""
    plain = tensor.detach()
    if plain.device.type == "cpu" or (plain.is_cuda and is_cuda_aware()):
        return plain.contiguous()
    return plain.to("cpu").contiguous()


def copy_back(tensor: Tensor, values: Tensor) -> None:
    """Copies what MPI has written into a tensor, unless it was written there."""
    if values.data_ptr() != tensor.data_ptr() or values.device != tensor.device:
        tensor.detach().copy_(values.view_as(tensor))
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


@contextmanager
def on_host(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yields the tensors' values where MPI can reach them, and copies back what it has written."""
    values = list(map(to_host, tensors))
    yield values
    for tensor, value in zip(tensors, values, strict=True):
        copy_back(tensor, value)


def record_events(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Records how far the GPUs' queues are; the returned call waits until they have come to that point.

    Another thread runs the collective, while the GPU may still compute what it sends.
    """
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


@functools.cache
def is_cuda_aware() -> bool:
    """Whether the MPI library that is loaded says that it reads GPU memory by itself."""
    query = getattr(_loaded_library(), "MPIX_Query_cuda_support", None)
    return bool(query is not None and torch.cuda.is_available() and query())


def _loaded_library() -> ctypes.CDLL | None:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").split("\n")
    files = {line.split(maxsplit=5)[5] for line in lines if "/libmpi.so" in line}
    return ctypes.CDLL(min(files)) if files else None
