"""The digest of a tensor: 128 bits of its bytes, the same on every device and for every layout.

`torch.hash_tensor` XORs the elements: it cannot see that two were exchanged, and hash([5, 5]) == hash([7, 7]); an
integer sum is as blind (measured on torch 2.13). XXH3 (https://xxhash.com) depends on every position, at the speed of
memory. Against chance, not against forgery: two tensors that differ have the same digest with probability 2^-128.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bytes_of", "digest", "digest_of_bytes", "short_digest"]


def digest(tensor: Tensor) -> str:
    """Returns 32 hexadecimal digits that depend on every bit of a tensor's values, on its type and on its shape.

    Args:
        tensor: dense, of any shape and device; strides do not matter. Of a DTensor, this rank's part.

    Example:
        >>> import torch
        >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
        False
    """
    local = getattr(tensor, "_local_tensor", tensor).detach()
    state = xxhash.xxh3_128(f"{local.dtype}{tuple(local.shape)}".encode())
    state.update(_data(local))
    return state.hexdigest()


def short_digest(tensor: Tensor) -> int:
    """Returns the same in 64 bits, for what is compared often and examined further where it differs."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    seed = xxhash.xxh3_64_intdigest(f"{local.dtype}{tuple(local.shape)}".encode())
    return xxhash.xxh3_64_intdigest(_data(local), seed=seed)


def digest_of_bytes(data: bytes) -> str:
    """Returns the digest of what is no tensor."""
    return xxhash.xxh3_128_hexdigest(data)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a dense tensor's values, shape [bytes], uint8, on its device; a view where possible."""
    import torch  # not above: observers of a script take digests, and must not import torch before it does

    local = getattr(tensor, "_local_tensor", tensor).detach().resolve_conj().resolve_neg()
    return local.contiguous().reshape(-1).view(torch.uint8)


def _data(tensor: Tensor) -> memoryview:
    import torch

    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return bytes_of(tensor.cpu()).numpy().data
