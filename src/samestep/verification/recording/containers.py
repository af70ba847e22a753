"""Batches with named parts: dictionaries and their like, named tuples, dataclasses. Each keeps its type when rebuilt.

A script calls methods of its batch (`batch.to(device)` of a BatchEncoding), so a dictionary in its place is no batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any


def named_parts(value: Any) -> dict[Any, Any] | None:
    """Returns name -> part, in order; None where a value has no named parts."""
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in fields if hasattr(value, name)}
    return None


def rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """Returns a container of the type of `value`, and with its other attributes, that holds these parts.

    A mapping that cannot be changed after it was made, and takes no dictionary either, becomes a dictionary.
    """
    if type(value) is dict:
        return parts
    if isinstance(value, tuple):
        return type(value)(*parts.values())
    try:
        new = copy.copy(value)
        if isinstance(value, Mapping):
            _unshare(new)
            for key, part in parts.items():
                new[key] = part
        else:
            for name, part in parts.items():
                object.__setattr__(new, name, part)  # also of a frozen one, and not by its __post_init__
    except (TypeError, AttributeError):
        return _made_anew(type(value), parts)
    return new


def _unshare(new: Any) -> None:
    """Gives a copy dictionaries of its own: the items of a mapping are in one, which a plain copy shares."""
    for name, one in getattr(new, "__dict__", {}).items():
        if isinstance(one, dict):
            new.__dict__[name] = copy.copy(one)


def _made_anew(kind: Any, parts: dict[Any, Any]) -> Any:
    try:
        return kind(parts)
    except TypeError:
        return parts
