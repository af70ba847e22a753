"""What a checkpoint folder holds, as one JSON text that proves its own integrity. No torch: the command line reads it.

    {
     "sha256": "…",      of the whole text, taken with 64 zeros in its own place
     "schema": 4,        3 had no "parts", 2 no "run" either, 1 no "places" either
     …                   one entry of Manifest a line
    }

The text comes from a disk, and may come from a stranger. So its size and the number of values in it are bounded
before it is parsed, and every entry is checked before anything is made of it: a manifest of 40 bytes may otherwise
ask for 40 terabytes. safetensors leaves such limits to its users, and reads duplicate keys as its parser pleases.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from samestep.errors import CheckpointError
from samestep.running.checkpoints.grid import PAYLOAD, is_grid, volumes

__all__ = ["MANIFEST", "PAYLOAD", "SCHEMA", "Manifest", "bytes_of", "from_text", "parsed", "to_text"]

SCHEMA = 4
MANIFEST = "manifest.json"
LONGEST = 40 * 2**20  # bytes of JSON, enough for 100,000 tensors

# Parsed, a list or object takes up to 250 bytes and a value 60, so these keep a hostile text below 256 MiB.
_MOST_CONTAINERS = 450_000
_MOST_VALUES = 1_000_000
_MOST_DIMS = 64
_MOST_FILES = 10_000

_UNSEALED = "0" * 64
_SEAL = re.compile(r'\{\n "sha256": "([0-9a-f]{64})",\n')
RUN_NAME = re.compile(r"[0-9a-f]{8,64}", re.ASCII)
_PLAIN_NAME = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}


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
        tensors: name -> {"dtype", "shape"} of the whole tensor.
        files: name -> {"size" in bytes, "sha256"}.
        places: name of a tensor -> [first byte in the payload, byte after the last, CRC-32]. The SHA-256 of the file
            says whether it is damaged, the CRC-32 of each tensor which ones are. Empty in schema 1. Of a tensor in
            parts a list of these, in the order of its ranks.
        run: the name of the run that saved, see :mod:`samestep.running.checkpoints.identity`. Empty where nobody knows.
        parts: name of a tensor that lies in several files, or in that of another rank than the first -> {"bounds",
            "ranks"}, see :mod:`samestep.running.checkpoints.grid`.
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
    places: dict[str, list[int]] = field(default_factory=dict)
    run: str = ""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


_ENTRIES = {4: {entry.name for entry in fields(Manifest)}}
_ENTRIES[3] = _ENTRIES[4] - {"parts"}
_ENTRIES[2] = _ENTRIES[3] - {"run"}
_ENTRIES[1] = _ENTRIES[2] - {"places"}


def bytes_of(described: dict[str, Any]) -> int:
    """Returns how many bytes the tensor takes that an entry of `Manifest.tensors` describes."""
    size = ITEM_BYTES[described["dtype"]]
    for length in described["shape"]:
        size *= length
    return size


def to_text(manifest: Manifest) -> str:
    """Returns the manifest as JSON, an entry a line; the first is the SHA-256 of the whole text.

    Raises:
        CheckpointError: it is longer than what :func:`from_text` would read.
    """
    entries = {"sha256": _UNSEALED, **vars(manifest)}
    lines = [f" {json.dumps(name)}: {json.dumps(entry, allow_nan=False)}" for name, entry in entries.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if problem := _too_much(text):
        raise CheckpointError(f"the state has too many parts for one checkpoint: {problem}")
    return text.replace(_UNSEALED, _digest(text), 1)


def from_text(text: str) -> Manifest:
    """Reads what :func:`to_text` wrote.

    Raises:
        CheckpointError: the text is not such a manifest, was altered, or is of a later schema.
    """
    seal = _SEAL.match(text)
    if seal is None:
        raise CheckpointError(f"{MANIFEST} is damaged: it does not begin with its own SHA-256")
    if _digest(text.replace(seal[1], _UNSEALED, 1)) != seal[1]:
        raise CheckpointError(f"{MANIFEST} is damaged: its SHA-256 differs from the {seal[1][:12]}… it states")
    entries = parsed(text, MANIFEST)
    del entries["sha256"]
    schema = entries.get("schema")
    if type(schema) is not int or schema not in _ENTRIES:
        raise CheckpointError(
            f"{MANIFEST} has schema {ascii(schema)[:20]}, this samestep reads {SCHEMA} and those before it; "
            "read it with the version that wrote it"
        )
    if set(entries) != _ENTRIES[schema]:
        raise CheckpointError(f"{MANIFEST} has other entries than those of schema {schema}")
    _check(entries)
    return Manifest(**entries)


def parsed(text: str, what: str) -> dict[str, Any]:
    """Returns the JSON object that `text` is, at a bounded price.

    Raises:
        CheckpointError: it is no JSON object, repeats a key, or is too big; `what` is named.
    """
    if problem := _too_much(text):
        raise CheckpointError(f"{what} is refused: {problem}")
    try:
        with _uncollected():
            entries = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is damaged: {str(error)[:200]}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{what} is damaged: it is not a JSON object")
    return entries


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which would look at every new list again and again; JSON has no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _too_much(text: str) -> str | None:
    if len(text) > LONGEST:
        return f"{len(text):,} bytes of JSON, and none may have more than {LONGEST:,}"
    containers = text.count("{") + text.count("[")
    if containers > _MOST_CONTAINERS or text.count(",") > _MOST_VALUES:
        return f"{containers:,} lists and objects with {text.count(','):,} commas in its JSON are too many"
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object repeats a key")
    return entries


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check(entries: dict[str, Any]) -> None:
    """Refuses entries of other types than :class:`Manifest` states; a sealed text may still be a stranger's."""
    numbers = (entries[name] for name in ("step", "epoch", "world_size"))
    _expect("step, epoch and world_size", all(_is_count(number) for number in numbers))
    _expect("the versions", all(isinstance(entries[name], str) for name in ("samestep", "torch")))
    run = entries.setdefault("run", "")
    _expect("run", isinstance(run, str) and (not run or RUN_NAME.fullmatch(run) is not None))
    for name in ("about", "state", "tensors", "files"):
        _expect(name, isinstance(entries[name], dict))
    for name in ("places", "parts"):
        _expect(name, isinstance(entries.setdefault(name, {}), dict))
    for name in entries["state"]:
        entries["about"].setdefault(name, {"kind": "unknown"})
    _expect("about", all(isinstance(about, dict) and "kind" in about for about in entries["about"].values()))
    _expect("tensors", all(map(_is_tensor, entries["tensors"].values())))
    _expect("files", len(entries["files"]) <= _MOST_FILES)
    for name, file in entries["files"].items():
        if not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(f"{MANIFEST} lists the file {name[:100]!r}, which is not a plain file name")
        _expect("files", _is_file(file))
    _check_parts(entries)
    _check_places(entries["places"], entries["tensors"], entries["parts"])


def _check_parts(entries: dict[str, Any]) -> None:
    parts, tensors = entries["parts"], entries["tensors"]
    _expect("parts", parts.keys() <= tensors.keys() and (not parts or bool(entries["places"])))
    for name, grid in parts.items():
        _expect("parts", is_grid(grid, tensors[name]["shape"], entries["files"]))


def _check_places(places: dict[str, Any], tensors: dict[str, Any], parts: dict[str, Any]) -> None:
    _expect("places", not places or places.keys() == tensors.keys())
    for name, place in places.items():
        if name not in parts:
            _expect("places", _is_place(place, bytes_of(tensors[name])))
            continue
        _expect("places", isinstance(place, list) and len(place) == len(parts[name]["ranks"]))
        item = ITEM_BYTES[tensors[name]["dtype"]]
        _expect(
            "places", all(_is_place(one, item * count) for one, count in zip(place, volumes(parts[name]), strict=True))
        )


def _is_place(place: Any, size: int) -> bool:
    return isinstance(place, list) and len(place) == 3 and _are_counts(place) and place[1] - place[0] == size


def _expect(what: str, fits: bool) -> None:
    if not fits:
        raise CheckpointError(f"{MANIFEST} is refused: its {what} cannot be what a checkpoint states")


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape"} or not isinstance(entry["dtype"], str):
        return False
    shape = entry["shape"]
    fits = isinstance(shape, list) and len(shape) <= _MOST_DIMS and _are_counts(shape)
    return fits and entry["dtype"] in ITEM_BYTES


def _is_file(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
        return False
    return _is_count(entry["size"]) and re.fullmatch("[0-9a-f]{64}", str(entry["sha256"])) is not None


def _are_counts(values: Iterable[Any]) -> bool:
    return all(map(_is_count, values))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
