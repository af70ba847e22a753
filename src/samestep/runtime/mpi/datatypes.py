"""PyTorch's types and operations in MPI's words.

MPI has no half types: those are added in float32, which MPI does have, and rounded once. That takes twice the bytes;
an operation of our own over two-byte types would be called back from C for every few kilobytes. A truth value is
added as "or" and multiplied as "and", as PyTorch does it elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samestep.errors import UsageError

__all__: list[str] = []

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
OF_TRUTH = {"sum": "LOR", "max": "LOR", "bor": "LOR", "product": "LAND", "min": "LAND", "band": "LAND", "bxor": "LXOR"}
BITWISE = ("band", "bor", "bxor")


def check_reducible(tensor: Tensor, op: str) -> None:
    """Raises UsageError where MPI cannot do `op` on such a tensor, nor can we."""
    if tensor.layout is not torch.strided:
        raise UsageError("MPI adds dense tensors, and this one is sparse: pass it to a group of gloo's")
    floating = tensor.is_floating_point() or tensor.is_complex()
    known = tensor.dtype in NAMES or tensor.dtype in HALVES
    fits = op in (OF_TRUTH if tensor.dtype is torch.bool else OPERATIONS)
    if known and fits and not (floating and op in BITWISE) and not (tensor.is_complex() and op in {"min", "max"}):
        return
    raise UsageError(f"MPI has no {op.upper()} of {str(tensor.dtype).removeprefix('torch.')} tensors")


def as_added(tensor: Tensor) -> Tensor:
    """Returns the tensor in a type that MPI adds: itself, unless it is of a half type."""
    return tensor.to(torch.float32) if tensor.dtype in HALVES else tensor


def datatype(mpi: Any, dtype: torch.dtype) -> Any:
    """Returns MPI's name for a type that it knows."""
    return getattr(mpi, NAMES[dtype])


def operation(mpi: Any, op: str, dtype: torch.dtype) -> Any:
    """Returns MPI's name for an operation; an average is a sum until it is divided."""
    return getattr(mpi, OF_TRUTH[op] if dtype is torch.bool else OPERATIONS[op])


def divide(tensor: Tensor, ranks: int) -> None:
    """Makes the sum over so many ranks their mean, in place; whole numbers are cut, as PyTorch's other backends do."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(ranks)
    else:
        tensor.div_(ranks, rounding_mode="trunc")
