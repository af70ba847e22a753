"""What ranks write into their store, checked as if anybody could have written it: c10d authenticates nobody."""

from __future__ import annotations

import functools
import json
import types
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from samestep.errors import RendezvousError

MAX_REGISTRATION_BYTES = 1 << 16  # a registration is a few hundred
MAX_MESSAGE_BYTES = 1 << 26  # the positions of a large checkpoint's tensors are some million
_INVALID = object()


def decode_registration(value: bytes, rank: int) -> dict[str, Any]:
    entry = _decode(value, MAX_REGISTRATION_BYTES)
    known = {"host": str, "pid": int, "size": int}
    if not isinstance(entry, dict) or any(type(entry.get(name)) is not kind for name, kind in known.items()):
        raise RendezvousError(
            f"rank {rank}'s registration in the store is malformed ({len(value)} bytes): somebody else writes "
            "there, or its samestep is of another version"
        )
    return entry


def decode_message(value: bytes | str, *forms: Any, of: str) -> Any:
    """Returns a rank's message in the store, where it has one of the forms; dataclasses as dicts.

    Args:
        value: the message.
        forms: as annotations: `list[tuple[int, str | None]]`, a dataclass; or a dict of names and their forms.
        of: whose it is and what, for the error.

    Raises:
        RendezvousError: it is nothing that a rank writes.
    """
    decoded = _decode(value, MAX_MESSAGE_BYTES)
    if not any(matches_type(decoded, form) for form in forms):
        raise RendezvousError(
            f"the message of {of} in the store is malformed ({len(value)} bytes): somebody else "
            "writes there, or its samestep is of another version"
        )
    return decoded


def _decode(value: bytes | str, limit: int) -> Any:
    try:
        return json.loads(value) if len(value) <= limit else _INVALID
    except (ValueError, RecursionError):
        return _INVALID


def matches_type(value: Any, form: Any) -> bool:
    """Whether a JSON value is of a form.

    >>> matches_type([[1, None], [2, "a"]], list[tuple[int, str | None]]), matches_type(True, int)
    (True, False)
    """
    if isinstance(form, dict):
        return (
            isinstance(value, dict)
            and set(value) == set(form)
            and all(matches_type(value[one], form[one]) for one in form)
        )
    if is_dataclass(form):
        whole: Any = form
        return matches_type(value, _fields(whole))
    if (origin := get_origin(form)) is None:
        return form is Any or value is form or type(value) is form or (form is float and type(value) is int)
    inner = get_args(form)
    if origin in {types.UnionType, Union}:
        return any(matches_type(value, None if one is types.NoneType else one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and all(matches_type(one, inner[1]) for one in value.values())
    if not isinstance(value, list):
        return False
    if origin is tuple:
        return len(value) == len(inner) and all(map(matches_type, value, inner))
    return all(matches_type(one, inner[0]) for one in value)


@functools.cache
def _fields(form: Any) -> dict[str, Any]:
    return get_type_hints(form)


def check_ranks_agree(registrations: list[dict[str, Any]]) -> None:
    """Raises RendezvousError where ranks have joined with different versions, sizes or settings."""
    for name in ("size", "samestep", "torch", "pipeline", "backend", "device"):
        values = {json.dumps(entry.get(name)) for entry in registrations}
        if len(values) > 1:
            listed = "; ".join(f"rank {rank}: {entry.get(name)}" for rank, entry in enumerate(registrations))
            raise RendezvousError(f"the ranks do not agree on {name}: {listed}")
