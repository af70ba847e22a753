"""Nested batches and states: their parts, their tensors, and the same with other tensors. Imports no torch.

Named parts are those of dictionaries and their like, named tuples, dataclasses. Each keeps its type when rebuilt: a
script calls methods of its batch (`batch.to(device)` of a BatchEncoding), so a dictionary in its place is no batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from samestep.verification.recording.naming import bare

if TYPE_CHECKING:
    from torch import Tensor


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


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a batch with all its tensors changed."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return change(value)
    if (parts := named_parts(value)) is not None:
        return rebuilt(value, {name: mapped(one, change) for name, one in parts.items()})
    return type(value)(mapped(one, change) for one in value) if isinstance(value, list | tuple) else value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists and dictionaries."""
    from torch import Tensor

    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(one)


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the name and value of every tensor in a nested state."""
    from torch import Tensor

    if isinstance(value, Tensor):
        yield bare(name), value
    elif isinstance(value, Mapping | list | tuple):
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in items:
            yield from named_tensors(one, f"{name}.{key}" if name else str(key))
