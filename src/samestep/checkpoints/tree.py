"""The JSON tree of a state, read back; :mod:`samestep.checkpoints.encoder` writes it. No torch here."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from samestep.errors import CheckpointError

MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def decode(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Returns the value that ``tree`` stands for, its tensors taken from ``tensors``.

    Raises:
        CheckpointError: the tree is malformed or refers to a tensor that is not there.
    """
    try:
        return _decode(tree, tensors)
    except RecursionError as error:
        raise CheckpointError("malformed manifest: a state is nested too deeply") from error


def _decode(tree: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise CheckpointError(f"malformed manifest: an object with the keys {str(sorted(tree))[:60]}")
    ((kind, content),) = tree.items()
    try:
        return _decode_object(kind, content, tensors)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        # a whole state in an error message would be unreadable
        start = repr(content[:60]) if isinstance(content, str) else f"a {type(content).__name__}"
        raise CheckpointError(f"malformed manifest: {kind[:60]!r} cannot hold {start}") from error


def _decode_object(kind: str, content: Any, tensors: Mapping[str, Any]) -> Any:
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "float":
        return float(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    for mapping, name in MAPPINGS.items():
        if kind == name:
            pairs = content.items() if isinstance(content, dict) else content
            return mapping({_decode(key, tensors): _decode(value, tensors) for key, value in pairs})
    raise ValueError(kind)
