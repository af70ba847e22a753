"""Files that people and programs write: read, checked value by value, and refused in one line that says what to do.

A section of a file is a dataclass; the metadata of a field says how its value is checked, or its type does:
`memory: float = field(metadata=read(quantity(BYTES)))` takes "80 GB". Numbers without a unit are seconds, bytes and
bytes a second.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from samestep.errors import UsageError

T = TypeVar("T")
Reader = Callable[[Any, str], Any]  # a value and its name; returns it, or raises UsageError

LARGEST = 1e30  # bytes, operations or seconds: sums and products of a few such are finite


class Units(NamedTuple):
    """Units of one quantity."""

    factors: dict[str, float]  # what each is worth
    example: str  # how such a quantity is written
    least: float | None = None  # 0 where it may be nothing; None where it must be above


_BYTES = {
    **{f"{prefix}B": 1e3**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}
_BITS = {f"{prefix}bit/s": 1e3**power / 8 for power, prefix in enumerate(("", "k", "M", "G", "T"))}
TIME = Units({"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}, 'a time such as "5 us"', least=0.0)
BYTES = Units(_BYTES, 'bytes such as "80 GB"')
BANDWIDTH = Units({f"{unit}/s": one for unit, one in _BYTES.items()} | _BITS, 'a bandwidth such as "10 Gbit/s"')
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def quantity(units: Units) -> Reader:
    """Returns a reader of numbers with units.

    >>> quantity(TIME)("5 us", "latency"), quantity(BANDWIDTH)("100 Gbit/s", "bandwidth"), quantity(BYTES)(80, "memory")
    (5e-06, 12500000000.0, 80.0)
    """

    def reader(value: Any, name: str) -> float:
        written = _NUMBER.fullmatch(value) if isinstance(value, str) else None
        if written is not None:
            unit = written[2]
            if unit and unit not in units.factors:
                raise UsageError(f"{name} is {value!r}, and the unit {unit} is unknown: {_hint(unit, units.factors)}")
            number = float(written[1]) * units.factors.get(unit, 1.0)
        elif _is_number(value):
            number = float(value)
        else:
            raise UsageError(f"{name} is {value!r}: give {units.example}")
        if not number < math.inf or not (number > 0 or number == units.least):
            least = "0 or more" if units.least == 0 else "above 0"
            raise UsageError(f"{name} is {value!r}: give {units.example}, {least}")
        return float(f"{number:.12g}")  # so that "5 us" is 5e-6 and nothing beside it

    return reader


def whole(least: int = 0, most: float = LARGEST) -> Reader:
    """Returns a reader of whole numbers.

    >>> whole(1)(3, "nodes.count")
    3
    """

    def reader(value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            span = f"{least} or more" if most == LARGEST else f"{least} to {most}"
            raise UsageError(f"{name} is {value!r:.40}: give a whole number, {span}")
        return value

    return reader


def positive(value: Any, name: str) -> float:
    """Returns a number above 0 that is not infinite."""
    if not _is_number(value) or not 0 < value <= LARGEST:
        raise UsageError(f"{name} is {value!r:.40}: give a number above 0")
    return float(value)


def one_of(known: Collection[str]) -> Reader:
    """Returns a reader of words.

    >>> one_of(["ring", "torus"])("torus", "kind")
    'torus'
    """

    def reader(value: Any, name: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise UsageError(f"{name} is {value!r:.40}: {_hint(str(value), known)}")
        return value

    return reader


def table(value: Any, name: str) -> dict[str, Any]:
    """Returns a section as it stands."""
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {value!r:.40}: write it as a section, [{name}]")
    return value


def many(kind: type[T]) -> Reader:
    """Returns a reader of a list of sections."""

    def reader(value: Any, name: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise UsageError(f"{name} is {value!r:.40}: give a list")
        return tuple(load(kind, one, f"{name}[{number}]") for number, one in enumerate(value))

    return reader


def read(reader: Reader) -> dict[str, Reader]:
    """Returns the metadata of a dataclass's field whose value is read so."""
    return {"read": reader}


def load(kind: type[T], given: Any, where: str, title: str = "") -> T:
    """Returns a dataclass made of a section.

    `where` is the section's name, before those of its values, empty for the whole of a file; `title` is what it is
    called by itself, `where` by default.

    Raises:
        UsageError: it is no section, has an unknown key or lacks one, or a value cannot be.
    """
    if not isinstance(given, dict):
        raise UsageError(f"{title or where} is {given!r:.40}: give a section with the keys {_names(kind)}")
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise UsageError(f"{key} in {title or where} is unknown: {_hint(key, known)}")
    values = {}
    for name, one in known.items():
        if name in given:
            reader = one.metadata.get("read") or _BY_TYPE[str(one.type)]
            values[name] = reader(given[name], f"{where}.{name}" if where else name)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise UsageError(f"{title or where} lacks its {name}")
    return kind(**values)


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Returns what a text of TOML says, or raises UsageError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not valid TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None
    except (RecursionError, ValueError):  # Python's own limits: of lists in lists, and of digits
        raise UsageError(f"{source}: its numbers are too long, or its lists too deep") from None


def parse_json(text: str, source: str) -> Any:
    """Returns what a text of JSON says, or raises UsageError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source} is not valid JSON, or cut off: line {error.lineno}: {error.msg.lower()}") from None
    except (RecursionError, ValueError):
        raise UsageError(f"{source}: its numbers are too long, or its lists too deep") from None


def read_text(path: str | Path, missing: str, name: str = "") -> str:
    """Returns the text of a file, or raises UsageError.

    `missing` says how to get one, where there is none; `name` is what messages call it, its path by default.
    """
    name = name or str(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{name}: no such file: {missing}") from None
    except IsADirectoryError:
        raise UsageError(f"{name} is a folder: give the file in it") from None
    except UnicodeDecodeError:
        raise UsageError(f"{name} cannot be read: it is not a text") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any, name: str) -> float:
    if not _is_number(value) or not 0 <= value <= LARGEST:
        raise UsageError(f"{name} is {value!r:.40}: give a number of 0 to {LARGEST:.0e}")
    return value  # type: ignore[no-any-return]  # a whole number stays one


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {value!r:.40}: give a text")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r:.40}: give true or false")
    return value


_BY_TYPE: dict[str, Reader] = {
    "int": whole(),
    "float": _number,
    "str": _text,
    "str | None": lambda value, name: None if value is None else _text(value, name),
    "bool": _flag,
}


def _names(kind: type[Any]) -> str:
    return ", ".join(one.name for one in fields(kind))


def _hint(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
