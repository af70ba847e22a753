"""Sparse tensors (COO) of fake GPUs: indices and values lie on the fake GPU; operators run the kernels of the CPU.

PyTorch makes a sparse tensor in C++ for any device; only its kernels are the device's. Those that just hand out a part
of it serve all devices, so the CPU's are called; every other operator runs on a CPU tensor of the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samestep.fake_gpus.host_memory import to_fake, to_host

KEY = torch._C.DispatchKey.SparseCPU  # noqa: SLF001
PARTS = {"_indices", "_values", "_nnz", "is_coalesced", "_coalesced_", "sparse_dim", "dense_dim", "_dimI", "_dimV"}
PARTS |= {"indices", "values"}
PARTS |= {"_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"}
_make = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default  # noqa: SLF001
_copy = torch.ops.aten.copy_sparse_to_sparse_.default


def is_part(op: Any) -> bool:
    """Whether an operator makes a sparse tensor of its parts, or hands one out."""
    return op._schema.name.removeprefix("aten::") in PARTS  # noqa: SLF001


def sparse_to_fake(tensor: Tensor, index: int) -> Tensor:
    """Returns a sparse tensor on GPU `index` that shares the bytes of a CPU tensor's indices and values."""
    return _made(tensor, *(to_fake(part, index) for part in _parts(tensor)))


def sparse_to_host(tensor: Tensor) -> Tensor:
    """Returns a sparse CPU tensor that shares the bytes of a fake GPU's indices and values."""
    return _made(tensor, *map(to_host, _parts(tensor)))


def write_sparse(own: Tensor, changed: Tensor) -> Tensor:
    """Gives a sparse tensor of a fake GPU what an operator has made of its CPU tensor."""
    _copy._op_dk(KEY, own, sparse_to_fake(changed, own.get_device()))  # noqa: SLF001
    return own


def copy_sparse(target: Tensor, source: Tensor, _non_blocking: bool = False) -> Tensor:
    """Copies a sparse tensor into another, either of which may lie in host memory."""
    held = sparse_to_host(source) if source.is_cuda else source
    return write_sparse(target, held.clone()) if target.is_cuda else target.copy_(held)


def _parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor._indices(), tensor._values()  # noqa: SLF001  (also of one that is not coalesced)


def _made(like: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    about = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device}
    parts = (like.sparse_dim(), like.dense_dim(), [*like.shape], indices, values)
    made: Tensor = _make._op_dk(KEY, *parts, **about, is_coalesced=like.is_coalesced())  # noqa: SLF001
    return made
