"""Metric values as JSON and back, so that one rank can compute them and all ranks hold the same bits.

Python's JSON writes a float with the digits that give it back exactly, and knows NaN and infinities. Types that JSON
lacks are wrapped in a dict that names them; a plain dict is wrapped too, so that its keys stay what they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from samestep.errors import DataError

__all__: list[str] = []

_LONGEST = 8  # bytes of a number that Python has too: it has no long double


def encode(value: Any, name: str) -> Any:
    """Returns `value` as something JSON can carry; a 0-dim tensor or array scalar as a plain number.

    Raises:
        DataError: the metric `name` returned a type that cannot be sent.

    >>> decode(encode({"per class": (torch.tensor([0.5, 1.0]), None)}, "f1"))
    {'per class': (tensor([0.5000, 1.0000]), None)}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return float(value) if isinstance(value, float) else value
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return value.item() if value.dim() == 0 else _wrap("tensor", value.tolist(), value.dtype, value.shape)
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf" and value.itemsize <= _LONGEST:
        return value.item() if value.ndim == 0 else _wrap("array", value.tolist(), value.dtype, value.shape)
    if isinstance(value, list | tuple):
        return {"is": "list" if isinstance(value, list) else "tuple", "items": [encode(item, name) for item in value]}
    if isinstance(value, dict):
        return {"is": "dict", "items": [[encode(key, name), encode(item, name)] for key, item in value.items()]}
    raise DataError(
        f"metric {name!r} returned a {_kind(value)}, which cannot be sent to the other ranks; "
        "return numbers, text, None, tensors, arrays, or lists, tuples and dicts of these"
    )


def decode(told: Any) -> Any:
    """Returns what :func:`encode` was given."""
    if not isinstance(told, dict):
        return told
    match told["is"]:
        case "tensor":
            return torch.tensor(told["items"], dtype=getattr(torch, told["dtype"])).reshape(told["shape"])
        case "array":
            return np.array(told["items"], dtype=told["dtype"]).reshape(told["shape"])
        case "dict":
            return {decode(key): decode(item) for key, item in told["items"]}
        case "tuple":
            return tuple(decode(item) for item in told["items"])
    return [decode(item) for item in told["items"]]


def _wrap(kind: str, items: Any, dtype: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"is": kind, "items": items, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}


def _kind(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ + ("" if dtype is None else f" of {dtype}")
