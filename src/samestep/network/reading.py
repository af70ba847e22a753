"""Values of a file that people write: sections, whole numbers, words; and what is said of one that cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from samestep.errors import UsageError

__all__: list[str] = []


def section(given: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns a section of a file, empty where it is left out.

    Raises:
        UsageError: it is none, or has a key beside those that are known.
    """
    section = given.get(name, {})
    if not isinstance(section, dict):
        raise UsageError(f"{name} is {section!r}: write it as a section, [{name}]")
    check_keys(section, keys, f"[{name}]")
    return section


def check_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuses a key that is unknown.

    Raises:
        UsageError: names the nearest that is known, or all.
    """
    for key in given:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"{key} in {where} is unknown: {hint}")


def read_whole(given: Mapping[str, Any], name: str, least: int) -> int:
    """Returns a whole number; the least where it is left out.

    >>> read_whole({"count": 3}, "nodes.count", 1), read_whole({}, "nodes.count", 1)
    (3, 1)
    """
    value = given.get(name.rpartition(".")[2], least)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}: give a whole number, {least} or more")
    return value


def read_positive(value: Any, name: str) -> float:
    """Returns a number above 0, endless ones excepted."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}: give a number above 0")
    return float(value)


def read_name(value: Any, known: tuple[str, ...], name: str) -> str:
    """Returns one of the words that are known.

    >>> read_name("torus", ("ring", "torus"), "kind")
    'torus'
    """
    if value not in known:
        close = get_close_matches(str(value), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise UsageError(f"{name} is {value!r}: {hint}")
    return str(value)
