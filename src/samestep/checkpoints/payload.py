"""A file with tensors, as bytes: how it is written, and whether it is still what was written. No torch here.

    8 bytes   length of the header           safetensors: https://huggingface.co/docs/safetensors
    header    JSON, name -> dtype, shape, [begin, end)
    tensors   one behind the other, no gap, to the end of the file

The manifest determines the whole file but for the tensors' values: their order is that of the size of their items, the
largest first, and of their names. So a header is never parsed: it is compared with the one that the manifest implies.
Each tensor is hashed in memory before its bytes are written, so what changes on the way to the disk is found too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from samestep.checkpoints.grid import PAYLOAD, file_of, shape_of
from samestep.checkpoints.manifest import ITEM_BYTES, Manifest, bytes_of
from samestep.errors import CheckpointError

_CHUNK = 1 << 20
_NAMES = {  # safetensors' own; complex128 it does not have, and it is stored as pairs of float64
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}

Entries = Mapping[str, Mapping[str, Any]]  # name of a tensor -> {"dtype", "shape"}, and "sha256" where it is known


class DamageError(CheckpointError):
    """A checkpoint is not what was saved.

    Attributes:
        file: the file that is damaged, missing, or should not be there; None where it is the folder.
        tensors: the tensors in it that are damaged, where that is known.
    """

    def __init__(self, message: str, file: str | None = None, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.file = file
        self.tensors = tensors


class ForeignError(DamageError):
    """A checkpoint is as it was saved, but by another run than the one whose directory it lies in."""


def payloads(manifest: Manifest) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the files with tensors: name -> what each holds of which tensors; the first one is always there."""
    found: dict[str, dict[str, dict[str, Any]]] = {PAYLOAD: {}}
    for name, entry in manifest.tensors.items():
        grid = manifest.parts.get(name)
        if grid is None:
            found[PAYLOAD][name] = {**entry, "sha256": entry["sha256"][0]}
            continue
        for number, (rank, digest) in enumerate(zip(grid["ranks"], entry["sha256"], strict=True)):
            part = {"dtype": entry["dtype"], "shape": shape_of(grid, number), "sha256": digest}
            found.setdefault(file_of(rank), {})[name] = part
    return found


def layout(entries: Entries) -> tuple[bytes, dict[str, int]]:
    """Returns the header of the file that holds these tensors, and the size of each in the order in which they lie.

    Raises:
        CheckpointError: a name is no text that a file can hold.
    """
    names = sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name]["dtype"]], name))
    sizes = {name: bytes_of(dict(entries[name])) for name in names}
    header, at = {}, 0
    for name, size in sizes.items():
        dtype, shape = entries[name]["dtype"], entries[name]["shape"]
        pair = [2] if dtype == "complex128" else []
        header[name] = {"dtype": _NAMES[dtype], "shape": [*shape, *pair], "data_offsets": [at, at + size]}
        at += size
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the name of a tensor is no text: {error}") from error
    text += b" " * (-len(text) % 8)  # as the library does: what follows is aligned
    return len(text).to_bytes(8, "little") + text, sizes


def open_new(path: Path) -> BinaryIO:
    """Creates a file that only this user may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def write_payload(path: Path, entries: Entries, data: Mapping[str, memoryview]) -> dict[str, str]:
    """Writes and syncs a file with tensors; returns the SHA-256 of each as it is in memory."""
    header, sizes = layout(entries)
    digests = {}
    with open_new(path) as file:
        file.write(header)
        for name, size in sizes.items():
            digest = hashlib.sha256()
            for start in range(0, size, _CHUNK):
                piece = data[name][start : start + _CHUNK]
                digest.update(piece)
                file.write(piece)
            digests[name] = digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
    return digests


def open_plain(folder: Path, name: str) -> BinaryIO:
    """Opens a file of a checkpoint; refuses whatever would lead out of the folder, and all but a regular file.

    Raises:
        CheckpointError: there is no such file, or a link or something else stands in its place.
        OSError: the system refuses.
    """
    if folder.is_symlink():
        raise CheckpointError("it is a symbolic link, not a folder")
    try:
        # Not followed: the link could lead anywhere. Not waited for: a named pipe would never open.
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} is missing") from error
    except NotADirectoryError as error:
        raise CheckpointError("it is not a folder") from error
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENXIO}:
            raise
        raise CheckpointError(f"{name} is not a regular file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def check_payload(
    folder: Path, name: str, entries: Entries, *, digests: bool, progress: Callable[[int], None] | None = None
) -> None:
    """Checks that a file is what the manifest says, byte for byte.

    Args:
        folder: of the checkpoint.
        name: of the file.
        entries: what it holds, as :func:`payloads` returns it.
        digests: False leaves out the tensors, and looks at size and header only.
        progress: called with the number of bytes read, again and again.

    Raises:
        DamageError: it is not; names the tensors that are damaged.
        CheckpointError: it is no plain file.
    """
    header, sizes = layout(entries)
    expected = len(header) + sum(sizes.values())
    with open_plain(folder, name) as file:
        problem = ""
        if (size := os.fstat(file.fileno()).st_size) != expected:
            problem = f"{name} has {size:,} bytes instead of {expected:,}"
        elif file.read(len(header)) != header:
            problem = f"{name} has another header than {folder.name}'s manifest describes"
        if not digests:
            if problem:
                raise DamageError(problem, name)
            return
        file.seek(len(header))
        damaged = []
        for tensor, count in sizes.items():
            found = hashlib.sha256()
            for piece in _pieces(file, count):
                found.update(piece)
                if progress is not None:
                    progress(len(piece))
            if found.hexdigest() != entries[tensor]["sha256"]:
                damaged.append(tensor)
    if problem or damaged:
        problem = problem or f"{name} has other bytes than those whose SHA-256 the manifest states"
        raise DamageError(f"{problem}; {_naming(damaged, len(sizes))}", name, tuple(damaged))


def _pieces(file: BinaryIO, count: int) -> Iterator[bytes]:
    while count > 0 and (piece := file.read(min(_CHUNK, count))):
        count -= len(piece)
        yield piece


def _naming(damaged: list[str], count: int) -> str:
    if not damaged:
        return "every tensor in it is whole"
    if len(damaged) == count > 1:
        return f"none of its {count} tensors is what was saved"
    more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
    return f"damaged: {', '.join(name[:100] for name in damaged[:3])}{more}"
