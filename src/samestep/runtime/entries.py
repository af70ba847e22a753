"""What ranks write into their store, read as if anybody could have written it: c10d asks nobody who they are."""

from __future__ import annotations

import functools
import json
import types
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from samestep.errors import RendezvousError

__all__: list[str] = []

LONGEST = 1 << 16  # bytes of an entry; one is a few hundred
_NOTHING = object()
LONGEST_LETTER = 1 << 26  # bytes; the places of a large checkpoint's tensors are some million


def entry_of(value: bytes, rank: int) -> dict[str, Any]:
    """Returns what a rank has signed in with. Whoever reaches the store can write there: nothing else is taken.

    Raises:
        RendezvousError: it is nothing that a rank writes.
    """
    entry = _read(value, LONGEST)
    known = {"host": str, "pid": int, "size": int}
    if not isinstance(entry, dict) or any(type(entry.get(name)) is not kind for name, kind in known.items()):
        raise RendezvousError(
            f"rank {rank}'s registration in the store is malformed ({len(value)} bytes): somebody else writes "
            "there, or its samestep is of another version"
        )
    return entry


def decode_message(value: bytes | str, *forms: Any, of: str) -> Any:
    """Returns what a rank has written into the store, where it has one of the forms; dataclasses as dicts.

    Args:
        value: what stands there.
        forms: as annotations: `list[tuple[int, str | None]]`, a dataclass; or a dict of names and their forms.
        of: whose it is and what, for the error.

    Raises:
        RendezvousError: it is nothing that a rank writes.
    """
    told = _read(value, LONGEST_LETTER)
    if not any(fits(told, form) for form in forms):
        raise RendezvousError(
            f"the message of {of} in the store is malformed ({len(value)} bytes): somebody else "
            "writes there, or its samestep is of another version"
        )
    return told


def _read(value: bytes | str, longest: int) -> Any:
    """Returns what JSON says; where it is none, or too long to be looked at, what fits no form."""
    try:
        return json.loads(value) if len(value) <= longest else _NOTHING
    except (ValueError, RecursionError):
        return _NOTHING


def fits(value: Any, form: Any) -> bool:
    """Whether a JSON value is of a form.

    >>> fits([[1, None], [2, "a"]], list[tuple[int, str | None]]), fits({"a": 1}, {"a": str}), fits(True, int)
    (True, False, False)
    """
    if isinstance(form, dict):
        return isinstance(value, dict) and set(value) == set(form) and all(fits(value[one], form[one]) for one in form)
    if is_dataclass(form):
        whole: Any = form
        return fits(value, _fields(whole))
    if (origin := get_origin(form)) is None:
        return form is Any or value is form or type(value) is form or (form is float and type(value) is int)
    inner = get_args(form)
    if origin in {types.UnionType, Union}:
        return any(fits(value, None if one is types.NoneType else one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if not isinstance(value, list):
        return False
    if origin is tuple:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return all(fits(one, inner[0]) for one in value)


@functools.cache
def _fields(form: Any) -> dict[str, Any]:
    return get_type_hints(form)


def compare(signed: list[dict[str, Any]]) -> None:
    """Raises RendezvousError where ranks have joined with unlike versions, sizes or settings."""
    for name in ("size", "samestep", "torch", "pipeline", "backend", "device"):
        values = {json.dumps(entry.get(name)) for entry in signed}
        if len(values) > 1:
            told = "; ".join(f"rank {rank}: {entry.get(name)}" for rank, entry in enumerate(signed))
            raise RendezvousError(f"the ranks do not agree on {name}: {told}")
