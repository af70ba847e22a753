"""Checks the form of JSON that another process or a file holds, against type hints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_hints = cache(get_type_hints)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns a JSON object that anybody may have written, or raises ValueError."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")  # noqa: TRY004  (to callers it is malformed, whatever its type)
    return found


def from_json(form: type[T], value: Any) -> T:
    """Returns what :func:`json.loads` has returned as a type hint has it, or raises ValueError, which says where.

    Objects become dataclasses, without the fields that these do not have; lists become tuples where the hint says so.
    The hint may hold bool, int, float, str, None, list, tuple, dict, Literal, Any and unions.

    Example:
        >>> from_json(tuple[int, ...], [1, 2])
        (1, 2)
    """
    return cast("T", _read(form, value, "value"))


def _read(form: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(form), get_args(form)
    if isinstance(form, type) and is_dataclass(form) and isinstance(value, dict):
        hints = _hints(form)
        missing = [one.name for one in fields(form) if one.default is one.default_factory is MISSING]
        if absent := [each for each in missing if each not in value]:
            raise ValueError(f"{name} has no {absent[0]}")
        known = {each: value[each] for each in hints if each in value}
        return cast("Any", form)(**{each: _read(hints[each], one, f"{name}.{each}") for each, one in known.items()})
    if origin in {Union, UnionType}:
        for option in arguments:
            try:
                return _read(option, value, name)
            except ValueError as error:
                reason = error
        raise reason
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            return tuple(_read(arguments[0], one, f"{name}[{at}]") for at, one in enumerate(value))
        if len(arguments) == len(value):
            pairs = zip(arguments, value, strict=True)
            return tuple(_read(each, one, f"{name}[{at}]") for at, (each, one) in enumerate(pairs))
    if origin is list and isinstance(value, list):
        return [_read(arguments[0], one, f"{name}[{at}]") for at, one in enumerate(value)]
    if origin in {dict, Mapping} and isinstance(value, dict):
        return {each: _read(arguments[1], one, f"{name}.{each}") for each, one in value.items()}
    if form is Any or (form is NoneType and value is None) or (form is float and type(value) in {int, float}):
        return value
    if form in {bool, int, str} and type(value) is form:
        return value
    raise ValueError(f"{name} is {value!r:.60}, not {getattr(form, '__name__', form)}")
