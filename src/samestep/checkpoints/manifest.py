"""What a checkpoint folder holds, as one JSON text that proves its own integrity. No torch: the command line reads it.

    {
     "sha256": "…",      of the whole text, taken with 64 zeros in its own place
     "schema": 1,
     …                   one entry of Manifest a line
    }

The text may come from a stranger. So its size and the number of values in it are bounded before it is parsed, and
every entry is checked before anything is made of it: a manifest of 40 bytes may otherwise ask for 40 terabytes.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from samestep.checkpoints.grid import is_grid
from samestep.errors import CheckpointError

SCHEMA = 1
MANIFEST = "manifest.json"
LONGEST = 40 * 2**20  # bytes of JSON, enough for 100,000 tensors

# Parsed, a list or object takes up to 250 bytes and a value 60, so these keep a hostile text below 256 MiB.
_MOST_CONTAINERS = 450_000
_MOST_VALUES = 1_000_000
_MOST_DIMS = 64
_MOST_RANKS = 10_000  # that write a file each

_UNSEALED = "0" * 64
_SEAL = re.compile(r'\{\n "sha256": "([0-9a-f]{64})",\n')
_DIGEST = re.compile("[0-9a-f]{64}")
RUN_ID = re.compile(r"[0-9a-f]{8,64}", re.ASCII)

_DTYPES = {  # name in torch -> bytes of an item, and the name in safetensors
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex64": (8, "C64"),
    "complex128": (16, "F64"),  # safetensors has none: stored as pairs of float64
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
}
ITEM_BYTES = {name: size for name, (size, _) in _DTYPES.items()}
SAFETENSORS_NAMES = {name: stored for name, (_, stored) in _DTYPES.items()}


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder holds.

    Attributes:
        samestep, torch: the versions that wrote it.
        extra: tree of what is saved beside the objects, see :mod:`samestep.checkpoints.extra_state`; None if converted.
        tensors: name -> {"dtype", "shape"} of the whole tensor and "sha256", of each of its parts in their order. The
            digests are those of the bytes in memory before they were written.
        parts: name of a tensor that lies in several files, or in that of another rank than the first -> {"bounds",
            "ranks"}, see :mod:`samestep.checkpoints.grid`.
        settings: name -> settings of that object as the script gave them, such as a learning rate.
    """

    schema: int  # version of this layout
    step: int  # optimizer steps committed before the save
    epoch: int  # epochs finished before the save
    world_size: int  # ranks that saved; 0 where nobody knows, as in a converted file
    samestep: str
    torch: str
    about: dict[str, dict[str, Any]]  # name -> what tells whether a saved object fits another one
    state: dict[str, Any]  # name -> tree of that object's state
    extra: Any
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    run: str = ""  # the id of the run that saved, see :mod:`samestep.checkpoints.directory`. Empty where nobody knows
    command: list[str] = field(default_factory=list)  # the command line of the run, secrets masked
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


_ENTRIES = {entry.name for entry in fields(Manifest)}


def values_of(described: dict[str, Any]) -> int:
    return math.prod(described["shape"])


def bytes_of(described: dict[str, Any]) -> int:
    return ITEM_BYTES[described["dtype"]] * values_of(described)


def to_text(manifest: Manifest) -> str:
    """Returns the manifest as JSON, an entry a line; the first is the SHA-256 of the whole text."""
    entries = {"sha256": _UNSEALED, **vars(manifest)}
    lines = [f" {json.dumps(name)}: {json.dumps(entry, allow_nan=False)}" for name, entry in entries.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if problem := _too_much(text):
        raise CheckpointError(f"the state has too many parts for one checkpoint: {problem}")
    return text.replace(_UNSEALED, _digest(text), 1)


def from_text(text: str) -> Manifest:
    """Reads what :func:`to_text` wrote; refuses what was altered, is of another schema, or no manifest."""
    seal = _SEAL.match(text)
    if seal is None:
        raise CheckpointError(f"{MANIFEST} is damaged: it does not begin with its own SHA-256")
    if _digest(text.replace(seal[1], _UNSEALED, 1)) != seal[1]:
        raise CheckpointError(f"{MANIFEST} is damaged: its SHA-256 differs from the {seal[1][:12]}… it states")
    entries = _parse(text)
    del entries["sha256"]
    schema = entries.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise CheckpointError(
            f"{MANIFEST} has schema {ascii(schema)[:20]}, this samestep reads {SCHEMA}; "
            "read it with the version that wrote it"
        )
    if set(entries) != _ENTRIES:
        raise CheckpointError(f"{MANIFEST} has other entries than those of schema {schema}")
    _check(entries)
    return Manifest(**entries)


def _parse(text: str) -> dict[str, Any]:
    if problem := _too_much(text):
        raise CheckpointError(f"{MANIFEST} is refused: {problem}")
    was_on = gc.isenabled()
    gc.disable()  # the collector would look at every new list again and again; JSON has no cycles
    try:
        entries = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {str(error)[:200]}") from error
    finally:
        if was_on:
            gc.enable()
    if not isinstance(entries, dict):
        raise CheckpointError(f"{MANIFEST} is damaged: it is not a JSON object")
    return entries


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


# --- entries of other types than Manifest states: a sealed text may still be a stranger's --------------------


def _check(entries: dict[str, Any]) -> None:
    for name, is_valid in _CHECKS.items():
        _expect(name, is_valid(entries[name]))
    for name in entries["state"]:
        entries["about"].setdefault(name, {"kind": "unknown"})
    tensors, parts = entries["tensors"], entries["parts"]
    _expect("parts", parts.keys() <= tensors.keys())
    for name, entry in tensors.items():
        grid = parts.get(name)
        _expect("parts", grid is None or is_grid(grid, entry["shape"], _MOST_RANKS))
        _expect("tensors", len(entry["sha256"]) == (1 if grid is None else len(grid["ranks"])))


def _expect(what: str, fits: bool) -> None:
    if not fits:
        raise CheckpointError(f"{MANIFEST} is refused: its {what} cannot be what a checkpoint states")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "sha256"}:
        return False
    dtype, shape, digests = entry["dtype"], entry["shape"], entry["sha256"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return False
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(map(_is_count, shape)):
        return False
    return isinstance(digests, list) and all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in digests)


def _all(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "epoch", "world_size"), _is_count),
    **dict.fromkeys(("samestep", "torch"), _is_text),
    **dict.fromkeys(("state", "parts"), _is_object),
    "about": _all(lambda about: isinstance(about, dict) and "kind" in about),
    "tensors": _all(_is_tensor),
    "run": lambda run: run == "" or (isinstance(run, str) and RUN_ID.fullmatch(run) is not None),
    "command": lambda words: isinstance(words, list) and all(map(_is_text, words)),
    "settings": _all(_is_object),
}


# --- the JSON tree of a state, read back; samestep.checkpoints.encoder writes it ----------------------------------

MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


class Placeholder:
    """Stands for a tensor where a tree is looked at and no tensor is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def numpy(self) -> None:
        """An array is no tensor."""


def decode(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Returns the value that ``tree`` stands for, its tensors taken from ``tensors``."""
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
