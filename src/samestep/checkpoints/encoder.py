"""Nested Python data and tensors on one side, a JSON tree and a table of named tensors on the other.

    {"lr": 0.1, "state": {7: (tensor, 2)}}
        ->  {"dict": {"lr": 0.1, "state": {"dict": [[7, {"tuple": [{"tensor": "optimizer/state/7/0"}, 2]}]]}}}

Lists and plain values stand for themselves. Anything else is an object with one key, which says what it stands for.
A dictionary whose keys are not all strings is a list of pairs, so that keys keep their type. No code can hide in JSON
or in safetensors, unlike in the pickles of `torch.save` and of PyTorch's distributed checkpoint.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from samestep.checkpoints.manifest import MAPPINGS, decode
from samestep.checkpoints.sharding import is_sharded
from samestep.errors import CheckpointError

_ARRAYS = {("b", 1), *itertools.product("iu", (1, 2, 4, 8)), *itertools.product("f", (2, 4, 8)), ("c", 8), ("c", 16)}


class Encoder:
    """Turns values into JSON trees and collects their tensors, each distinct one once.

    A tensor reached under two names (tied weights) is stored once and referred to twice.

    Attributes:
        tensors: name -> tensor, where it stands; added to in place.
        sharded: place -> DTensor, of all places: a rank that has no part of one cannot see that it is tied.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors = {} if tensors is None else tensors
        self.sharded: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Returns the JSON tree of ``value``; ``where`` names its tensors and is named in errors."""
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, where)}
        if type(value) in MAPPINGS:
            return {MAPPINGS[type(value)]: self._entries(value, where)}
        if type(value) in {list, tuple}:
            items = [self.encode(item, f"{where}/{i}") for i, item in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, np.generic) and not isinstance(plain := value.item(), np.generic):
            return self.encode(plain, where)
        if isinstance(value, np.ndarray) and (value.dtype.kind, value.dtype.itemsize) in _ARRAYS:
            return {"array": self._tensor(torch.from_numpy(value.astype(value.dtype.newbyteorder("="))), where)}
        raise CheckpointError(
            f"cannot save {where}: a {type(value).__module__}.{type(value).__qualname__} is neither a tensor nor "
            "plain data (None, bool, int, float, str, bytes, list, tuple, dict); no pickle is written, so let "
            "state_dict() return its contents instead"
        )

    def unsharded(self) -> dict[str, Tensor]:
        """Returns the tensors; refuses one that is cut among the ranks."""
        for name in self.sharded:
            raise CheckpointError(f"cannot save {name}: a DTensor is cut among the ranks, and this is one rank's own")
        return self.tensors

    def _entries(self, mapping: dict[Any, Any], where: str) -> Any:
        entries = []
        for key, value in mapping.items():
            # "/" separates the levels, so within a key it is escaped as in a JSON pointer (RFC 6901).
            level = f"{where}/{str(key).replace('~', '~0').replace('/', '~1')}"
            entries.append([self.encode(key, level), self.encode(value, level)])
        return dict(entries) if all(isinstance(key, str) for key in mapping) else entries

    def _tensor(self, tensor: Tensor, where: str) -> str:
        sharded = is_sharded(tensor)
        plain = type(tensor) in {Tensor, torch.nn.Parameter, torch.nn.Buffer}
        if not (plain or sharded) or tensor.layout != torch.strided:
            raise CheckpointError(
                f"cannot save {where}: a {type(tensor).__name__} ({tensor.layout}) is not a plain dense tensor"
            )
        if tensor.is_quantized or tensor.is_meta:
            kind = "quantised" if tensor.is_quantized else "without storage (device meta)"
            raise CheckpointError(f"cannot save {where}: the tensor is {kind}")
        tensor = tensor.detach()
        here: Any = tensor.to_local() if sharded else tensor  # type: ignore[attr-defined]
        key = (here.device, here.data_ptr(), here.dtype, tensor.shape, here.stride(), here.is_conj(), here.is_neg())
        name = self._names.get(key) if here.numel() else None
        if name is None:
            name = where
            while name in self.tensors:  # the keys 0 and "0" of one dictionary
                name += "~"
            self.tensors[name] = tensor
            self._names[key] = name
        if sharded:
            self.sharded[where if where not in self.sharded else name] = tensor
        return name


def pack(value: Any, where: str) -> tuple[Any, bytes]:
    """Returns the tree of ``value``, and its tensors as one piece of data (safetensors)."""
    encoder = Encoder()
    tree = encoder.encode(value, where)
    return tree, to_bytes({name: _plain(tensor, where) for name, tensor in encoder.unsharded().items()})


def unpack(tree: Any, data: bytes) -> Any:
    return decode(tree, from_bytes(data))


def _plain(tensor: Tensor, where: str) -> Tensor:
    if tensor.dtype == torch.complex128:  # safetensors has no such type
        raise CheckpointError(f"{where} holds a complex128 tensor: keep it as view_as_real(…) or complex64")
    return tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
