"""Reads a file of `torch.save`, or a directory of torch.distributed.checkpoint, that somebody else may have made.

Both are pickles, and a pickle is a program. So this runs in a process of its own, limited in memory, time and the
size of what it writes (:mod:`samestep.checkpoints.convert` starts it), and even there nothing is executed:

    .pt            torch.load(weights_only=True)
    .metadata      an unpickler that knows the dozen classes that torch writes there, and no other
    values in it   torch.load(weights_only=True); torch's own reader takes whatever stands there
    file names     of this directory alone

What comes out is a checkpoint of ours: JSON and safetensors. The whole program, told by one line of JSON:

    python -m samestep.checkpoints.convert_worker < request.json
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from samestep._version import __version__
from samestep.checkpoints.convert import SAMESTEP_KEY
from samestep.checkpoints.directory import CheckpointDirectory
from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.manifest import MAPPINGS, SCHEMA, Manifest, decode, from_text
from samestep.checkpoints.state import uncompiled
from samestep.checkpoints.writer import write
from samestep.errors import CheckpointError

_SPARE = 2**30  # bytes beyond what is there after importing torch, and a few times the size of the file

_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}


def main() -> None:
    """Does what standard input asks for, and tells on standard output what became of it."""
    request = json.loads(sys.stdin.readline())
    set_limits(Path(request["source"]), request["timeout"])
    print(json.dumps(handle_request(request)))  # noqa: T201  (the answer)


def handle_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"left_out": names}, or {"error": a line}; `request` is as of :func:`import_file`, with both paths."""
    try:
        return {"left_out": import_file(Path(request["source"]), Path(request["into"]), request)}
    except CheckpointException as error:  # torch's own, not an Exception: what a reader of a directory has raised
        return {"error": _one_line(next((cause for cause, _ in error.failures.values()), error))}
    except Exception as error:  # noqa: BLE001  (of a stranger's file; the parent makes one line of it)
        return {"error": _one_line(error)}


def import_file(source: Path, into: Path, request: Mapping[str, Any]) -> list[str]:
    """Writes what `source` holds as a checkpoint into the directory `into`; returns the names of what was left out."""
    content = read_directory(source) if source.is_dir() else read_file(source)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"it holds a {type(content).__name__}, no dictionary of states")
    encoder = Encoder()
    if SAMESTEP_KEY in content:
        manifest, states = _ours(content)
        left_out: list[str] = []
    else:
        about, states, left_out = import_states(content, request["kinds"])
        step, epoch = request["step"], request["epoch"]
        # Saved by no ranks of ours: so no run takes its random streams, of which there are none, for its own.
        manifest = Manifest(SCHEMA, step, epoch, 0, __version__, str(torch.__version__), about, {}, None)
    extra = states.pop(SAMESTEP_KEY, None)
    state = {name: encoder.encode(value, name) for name, value in states.items()}
    manifest = replace(manifest, schema=SCHEMA, state=state, extra=encoder.encode(extra, "extra"))
    size = sum(tensor.nbytes for tensor in encoder.unsharded().values())
    if 0 < resource.getrlimit(resource.RLIMIT_AS)[0] < size:
        raise MemoryError  # a number that is stretched to terabytes takes memory only when it is written
    directory = CheckpointDirectory(into)
    try:
        write(directory, manifest, encoder.tensors)
    finally:
        directory.close()
    return left_out


def _ours(content: Mapping[str, Any]) -> tuple[Manifest, dict[str, Any]]:
    """What :mod:`samestep.checkpoints.convert` wrote, structure and types included."""
    try:
        manifest = from_text(content[SAMESTEP_KEY]["manifest"])
        states = {name: restore_structure(tree, content.get(name)) for name, tree in manifest.state.items()}
        return manifest, {**states, SAMESTEP_KEY: restore_structure(manifest.extra, content[SAMESTEP_KEY].get("extra"))}
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"its entry {SAMESTEP_KEY!r} does not fit the rest; without that entry it can be read"
        ) from error


def read_file(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (KeyError, IndexError, EOFError) as error:  # from an unpickler that met what is no pickle
        raise CheckpointError("it is no file that torch.save has written") from error


def read_directory(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = {}
    reader = _Reader(path)
    reader.read_metadata()  # what it refuses would below be told as "metadata is None"
    planner = _Planner()  # type: ignore[no-untyped-call]
    _load_state_dict(content, storage_reader=reader, planner=planner, no_dist=True)
    return content


def _member(kind: Any, name: Any) -> Any:
    """Stands in for `getattr`, by which Python before 3.11.4 pickles a member of an enumeration."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _METADATA_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """torch's reader, which must not execute what stands in the metadata, or be led elsewhere by it."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        folder = Path(self.path)
        metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError("its metadata are none")
        for info in (metadata.storage_data or {}).values():
            name = str(info.relative_path)
            file = folder / name
            if Path(name).name != name or file.is_symlink() or not file.is_file():
                raise CheckpointError(f"it refers to {name[:100]!r}, which is no plain file in it")
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError("it is compressed or encrypted")
        return metadata


class _Planner(_EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As torch's, but that reads whatever stands there."""
        loaded = torch.load(value, weights_only=True)
        saved = io.BytesIO()
        torch.save(loaded, saved)  # plain data by now, which torch's own may read
        saved.seek(0)
        super().load_bytes(read_item, saved)


def set_limits(source: Path, seconds: float) -> None:
    """Limits this process to what reading `source` can need."""
    files = [source] if source.is_file() else [entry for entry in source.iterdir() if entry.is_file()]
    size = sum(file.stat().st_size for file in files)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    for limit, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + 5 * size + _SPARE),
        (resource.RLIMIT_FSIZE, 4 * size + _SPARE),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    torch.set_num_threads(1)


def _one_line(error: BaseException) -> str:
    """One line, in which a stranger's text is short and harmless."""
    text = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL ([\w.]+)", text)
        what = f" ({found[1][:100]})" if found else ""
        return f"it holds something else than tensors and plain data{what}; nothing of it was executed"
    if isinstance(error, MemoryError) or "allocate" in text:
        return "it asks for more memory than a file of its size can need"
    if isinstance(error, CheckpointError):
        return "".join(character if character.isprintable() else "?" for character in text[:1000])
    return ascii(f"{type(error).__name__}: {text}"[:300])[1:-1]


# --- states of other formats: names without wrappers, kinds that a resume can compare -----------------------------


def import_states(
    content: Mapping[str, Any], kinds: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any], list[str]]:
    """Returns what tells about each state of a foreign file, the states, and the names of what is none.

    `kinds` are the classes of optimizers and schedules, by name.
    """
    if content and all(isinstance(value, Tensor) for value in content.values()):
        content = {"model": content}
    states = {str(name): value for name, value in content.items() if isinstance(value, Mapping)}
    left_out = [str(name) for name in content if str(name) not in states]
    if not states:
        raise CheckpointError("it holds no state: no dictionary of tensors, and none of dictionaries")
    if unknown := sorted(kinds.keys() - states.keys()):
        raise CheckpointError(f"--kind {unknown[0]}: it holds {', '.join(sorted(states))}")
    states = {name: _bare(value) if _is_module(value) else value for name, value in states.items()}
    states = {name: _numbered(value) if _is_optimizer(value) else value for name, value in states.items()}
    return {name: _about(name, value, kinds.get(name)) for name, value in states.items()}, states, left_out


def restore_structure(tree: Any, value: Any) -> Any:
    """Returns `value` with the structure and the plain data of `tree`: a tensor is all that is taken from it.

    Formats that flatten a state lose its empty parts and turn keys into texts.
    """
    if not _holds_tensors(tree):
        return decode(tree, {})
    if isinstance(tree, list):
        return [restore_structure(part, one) for part, one in zip(tree, value, strict=True)]
    ((kind, content),) = tree.items()
    if kind in {"tensor", "array"}:
        if not isinstance(value, Tensor):
            raise TypeError(kind)
        return value if kind == "tensor" else value.numpy()
    if kind == "tuple":
        return tuple(restore_structure(part, one) for part, one in zip(content, value, strict=True))
    pairs = content.items() if isinstance(content, dict) else content
    mapping = {name: made for made, name in MAPPINGS.items()}[kind]
    keys = [(decode(key, {}), part) for key, part in pairs]
    return mapping({key: restore_structure(part, value.get(key, value.get(str(key)))) for key, part in keys})


def _holds_tensors(tree: Any) -> bool:
    if isinstance(tree, list):
        return any(map(_holds_tensors, tree))
    if not isinstance(tree, dict):
        return False
    return any(key in {"tensor", "array"} or _holds_tensors(value) for key, value in tree.items())


def _is_module(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(key, str) and isinstance(one, Tensor) for key, one in value.items())


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    return value.keys() >= {"state", "param_groups"} and isinstance(value["state"], Mapping)


def _bare(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names without what DistributedDataParallel and torch.compile put before or between them."""
    names = {name: uncompiled(name) for name in state}
    while all(name.startswith("module.") for name in names.values()):
        names = {name: bare.removeprefix("module.") for name, bare in names.items()}
    if len(set(names.values())) != len(names):
        raise CheckpointError("two of its tensors have one name once wrappers are taken off")
    return {names[name]: value for name, value in state.items()}


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with whole numbers for its parameters again; flattened formats have texts there."""
    parts = {
        int(key) if isinstance(key, str) and key.isdecimal() else key: part for key, part in state["state"].items()
    }
    return {**state, "state": parts}


def _about(name: str, state: Mapping[Any, Any], kind: str | None) -> dict[str, Any]:
    if _is_module(state):
        return {"kind": "module"}
    if kind is None:
        return {"kind": "object"}
    about: dict[str, Any] = {"kind": _full_name(kind)}
    if _is_optimizer(state):
        about["shapes"] = [[_shape(name, state, number) for number in g["params"]] for g in state["param_groups"]]
    return about


def _full_name(kind: str) -> str:
    """The name under which a class of torch is saved; `torch.optim.AdamW` lives in `torch.optim.adamw`."""
    for room in (torch.optim, torch.optim.lr_scheduler):
        found = getattr(room, kind.rpartition(".")[2], None)
        if isinstance(found, type) and kind.startswith(("torch.optim", found.__name__)):
            return f"{found.__module__}.{found.__qualname__}"
    return kind


def _shape(name: str, state: Mapping[Any, Any], number: Any) -> list[int]:
    """The shape of a parameter, which is that of what the optimizer keeps for each of its values."""
    kept = [value for value in state["state"].get(number, {}).values() if isinstance(value, Tensor)]
    shapes = [list(value.shape) for value in kept if value.dim()] or [list(value.shape) for value in kept]
    if not shapes:
        raise CheckpointError(f"--kind {name}: the shape of its parameter {number} cannot be told from its state")
    return shapes[0]


if __name__ == "__main__":
    main()
