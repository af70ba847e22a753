"""Nested Python data and tensors on one side, a JSON tree and a table of named tensors on the other.

`torch.save` and PyTorch's distributed checkpoint write pickles: reading one runs whatever code its author put in,
and neither carries a checksum, so a flipped bit loads without a word (measured on torch 2.13: 1024 wrong values
from a zeroed block). safetensors holds flat tensors and nothing else. So the structure goes into JSON, where no
code can hide, the tensors go into safetensors, and the manifest carries a digest of every byte, its own included.

    {"lr": 0.1, "state": {7: (tensor, 2)}}
        ->  {"dict": {"lr": 0.1, "state": {"dict": [[7, {"tuple": [{"tensor": "optimizer/state/7/0"}, 2]}]]}}}

Lists and plain values stand for themselves. Anything else is an object with one key, which says what it stands for.
A dictionary whose keys are not all strings is a list of pairs, so that keys keep their type.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.errors import CheckpointError

__all__ = ["MANIFEST", "PAYLOAD", "SCHEMA", "Encoder", "Manifest", "decode", "from_text", "to_text"]

SCHEMA = 1
MANIFEST = "manifest.json"
PAYLOAD = "tensors.safetensors"

_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_UNSEALED = "0" * 64


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder holds.

    Attributes:
        schema: version of this layout.
        step: optimizer steps committed before the save.
        epoch: epochs finished before the save.
        world_size: ranks that saved.
        samestep, torch: the versions that wrote it.
        about: name -> what tells whether a saved object fits another one.
        state: name -> tree of that object's state.
        random: tree of the ranks' random streams.
        tensors: name -> {"dtype", "shape"}, in the order of the payload.
        files: name -> {"size" in bytes, "sha256"}.
    """

    schema: int
    step: int
    epoch: int
    world_size: int
    samestep: str
    torch: str
    about: dict[str, dict[str, Any]]
    state: dict[str, Any]
    random: Any
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


class Encoder:
    """Turns values into JSON trees and collects their tensors, each distinct one once.

    A tensor reached under two names (tied weights) is stored once and referred to twice.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors = {} if tensors is None else tensors  # name -> tensor, where it stands; added to in place
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Returns the JSON tree of ``value``; ``where`` names its tensors and is named in errors.

        Raises:
            CheckpointError: ``value`` holds something that is neither plain data nor a dense tensor.
        """
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, where)}
        if type(value) in _MAPPINGS:
            return {_MAPPINGS[type(value)]: self._entries(value, where)}
        if type(value) in {list, tuple}:
            items = [self.encode(item, f"{where}/{i}") for i, item in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, np.generic):
            return self.encode(value.item(), where)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"array": self._tensor(torch.from_numpy(np.array(value)), where)}
        raise CheckpointError(
            f"cannot save {where}: a {type(value).__module__}.{type(value).__qualname__} is neither a tensor nor "
            "plain data (None, bool, int, float, str, bytes, list, tuple, dict); no pickle is written, so let "
            "state_dict() return its contents instead"
        )

    def _entries(self, mapping: dict[Any, Any], where: str) -> Any:
        entries = []
        for key, value in mapping.items():
            # "/" separates the levels, so within a key it is escaped as in a JSON pointer (RFC 6901).
            level = f"{where}/{str(key).replace('~', '~0').replace('/', '~1')}"
            entries.append([self.encode(key, level), self.encode(value, level)])
        return dict(entries) if all(isinstance(key, str) for key in mapping) else entries

    def _tensor(self, tensor: Tensor, where: str) -> str:
        if type(tensor) not in {Tensor, torch.nn.Parameter, torch.nn.Buffer} or tensor.layout != torch.strided:
            raise CheckpointError(
                f"cannot save {where}: a {type(tensor).__name__} ({tensor.layout}) is not a plain dense tensor"
            )
        if tensor.is_quantized or tensor.is_meta:
            kind = "quantised" if tensor.is_quantized else "without storage (device meta)"
            raise CheckpointError(f"cannot save {where}: the tensor is {kind}")
        tensor = tensor.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        if tensor.numel() and place in self._names:
            return self._names[place]
        name = where
        while name in self.tensors:  # the keys 0 and "0" of one dictionary
            name += "~"
        self.tensors[name] = tensor
        self._names[place] = name
        return name


def decode(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the value that ``tree`` stands for, its tensors taken from ``tensors``.

    Raises:
        CheckpointError: the tree is malformed or refers to a tensor that is not there.
    """
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise CheckpointError(f"malformed manifest: an object with the keys {sorted(tree)}")
    ((kind, content),) = tree.items()
    try:
        return _decode_one(kind, content, tensors)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"malformed manifest: {kind!r} cannot hold {str(content)[:60]!r}") from error


def _decode_one(kind: str, content: Any, tensors: dict[str, Tensor]) -> Any:
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    if kind == "float":
        return float(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    for mapping, name in _MAPPINGS.items():
        if kind == name:
            pairs = content.items() if isinstance(content, dict) else content
            return mapping({decode(key, tensors): decode(value, tensors) for key, value in pairs})
    raise ValueError(kind)


def to_text(manifest: Manifest) -> str:
    """Returns the manifest as JSON, an entry a line; the first is the SHA-256 of the whole text.

    The digest is taken with 64 zeros in its own place, so it covers every byte of the file.
    """
    entries = {"sha256": _UNSEALED, **vars(manifest)}
    lines = [f" {json.dumps(name)}: {json.dumps(entry, allow_nan=False)}" for name, entry in entries.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    return text.replace(_UNSEALED, _digest(text), 1)


def from_text(text: str) -> Manifest:
    """Reads what :func:`to_text` wrote.

    Raises:
        CheckpointError: the text is not such a manifest, was altered, or is of a later schema.
    """
    try:
        entries = json.loads(text, object_pairs_hook=_without_duplicates)
        seal = entries.pop("sha256")
        intact = _digest(text.replace(seal, _UNSEALED, 1)) == seal
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{MANIFEST} is damaged: its SHA-256 differs from the {seal[:12]}… it states")
    if entries.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{MANIFEST} has schema {entries.get('schema')}, this samestep reads {SCHEMA}; "
            "read it with the version that wrote it"
        )
    if set(entries) != {entry.name for entry in fields(Manifest)}:
        raise CheckpointError(f"{MANIFEST} has the entries {sorted(entries)}, which are not those of schema {SCHEMA}")
    return Manifest(**entries)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object repeats a key")
    return entries


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
