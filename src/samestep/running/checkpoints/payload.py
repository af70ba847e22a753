"""A file with tensors, as bytes: where each one lies, and which of them are damaged. No torch here.

    8 bytes   length of the header           safetensors: https://huggingface.co/docs/safetensors
    header    JSON, name -> dtype, shape, [begin, end)
    tensors   one behind the other, no gap, to the end of the file

The library's own reader looks at no digest, allocates for a header of up to 100 MB, and of two equal keys takes the
last. Here the header is bounded and must say what the manifest says, byte for byte, before the library sees the file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from samestep.errors import CheckpointError
from samestep.running.checkpoints.layout import Payload
from samestep.running.checkpoints.manifest import LONGEST, bytes_of, parsed

__all__: list[str] = []

CHUNK = 1 << 20
_METADATA = "__metadata__"
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
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


def open_plain(folder: Path, name: str) -> BinaryIO:
    """Opens a file of a checkpoint; refuses whatever would lead out of the folder, and all but a regular file.

    Raises:
        CheckpointError: there is no such file, or a link or something else stands in its place.
        OSError: the system refuses.
    """
    if Path(name).name != name:
        raise CheckpointError(f"{name!r} is not a plain file name")
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


def pieces(file: BinaryIO, count: int) -> Iterator[bytes]:
    """Yields the next `count` bytes of a file, or those that are left, a mebibyte at a time."""
    while count > 0 and (piece := file.read(min(CHUNK, count))):
        count -= len(piece)
        yield piece


def check_header(folder: Path, payload: Payload) -> None:
    """Checks every tensor in a file.

    Raises:
        CheckpointError: the header is no header, or describes other tensors than the manifest.
    """
    with open_plain(folder, payload.name) as file:
        begin, header = _header(file, payload.name)
        end = os.fstat(file.fileno()).st_size
    header.pop(_METADATA, None)
    if odd := sorted(header.keys() ^ payload.held.keys()):
        where = "the manifest only" if odd[0] in payload.held else "the payload only"
        raise CheckpointError(f"{payload.name} cannot be read: {odd[0][:100]!r} is in {where}")
    spans = {}
    for name, entry in header.items():
        spans[name] = _span(payload.name, name, entry, _stored(payload.entry(name)), begin)
    _check_tiling(payload.name, spans, begin, end)
    for name, place in payload.places():
        if spans[name] != tuple(place[:2]):
            raise CheckpointError(f"{payload.name} has {name[:100]!r} at another place than the manifest")


def measure(
    folder: Path, name: str, progress: Callable[[int], None] | None = None
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Reads a payload once, and returns its entry of `Manifest.files` and the places of all tensors in it.

    Args:
        folder: of a checkpoint, or of one that is being written.
        name: of the file.
        progress: told the number of bytes read, again and again.
    """
    with open_plain(folder, name) as file:
        begin, header = _header(file, name)
        header.pop(_METADATA, None)
        spans = sorted(
            (begin + e["data_offsets"][0], begin + e["data_offsets"][1], tensor) for tensor, e in header.items()
        )
        file.seek(0)
        whole = hashlib.sha256(file.read(begin))
        places = {}
        for first, last, tensor in spans:
            checksum = 0
            for piece in pieces(file, last - first):
                whole.update(piece)
                checksum = zlib.crc32(piece, checksum)
                if progress is not None:
                    progress(len(piece))
            places[tensor] = [first, last, checksum]
        size = file.tell()
    return {"size": size, "sha256": whole.hexdigest()}, places


def damaged_tensors(folder: Path, payload: Payload) -> list[str]:
    """Returns the names of the tensors whose bytes are not those that were saved; empty too where nobody can say."""
    with open_plain(folder, payload.name) as file:
        return [name for name, place in payload.places() if not _is_whole(file, *place)]


def _is_whole(file: BinaryIO, begin: int, end: int, saved: int) -> bool:
    file.seek(begin)
    checksum, count = 0, 0
    for piece in pieces(file, end - begin):
        checksum, count = zlib.crc32(piece, checksum), count + len(piece)
    return (checksum, count) == (saved, end - begin)


def _header(file: BinaryIO, name: str) -> tuple[int, dict[str, Any]]:
    """Returns where the tensors begin, and the header."""
    length = int.from_bytes(file.read(8), "little")
    rest = os.fstat(file.fileno()).st_size - 8
    if not 2 <= length <= rest:
        raise CheckpointError(f"{name} has a header of {length:,} bytes, which cannot be ({max(rest, 0):,} follow)")
    if length > LONGEST:
        raise CheckpointError(f"{name} has a header of {length:,} bytes; none has more than {LONGEST:,}")
    try:
        text = file.read(length).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} has a damaged header: {error}") from error
    return 8 + length, parsed(text, f"the header of {name}")


def _stored(described: dict[str, Any]) -> tuple[str, list[int], int]:
    """What the header says of a tensor that the manifest describes."""
    if described["dtype"] == "complex128":
        return "F64", [*described["shape"], 2], bytes_of(described)
    return _NAMES[described["dtype"]], described["shape"], bytes_of(described)


def _span(file: str, name: str, entry: Any, expected: tuple[str, list[int], int], begin: int) -> tuple[int, int]:
    dtype, shape, size = expected
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file} does not describe {name[:100]!r}")
    if entry["dtype"] != dtype or entry["shape"] != shape:
        found, listed = _form(entry["dtype"], entry["shape"]), _form(dtype, shape)
        raise CheckpointError(f"{file} holds {name[:100]} as {found}, the manifest says {listed}")
    offsets = entry["data_offsets"]
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)):
        raise CheckpointError(f"{file} has no place for {name[:100]!r}")
    if offsets[1] - offsets[0] != size:
        raise CheckpointError(f"{file} gives {name[:100]!r} {str(offsets)[:60]}, which are not its {size:,} bytes")
    return begin + offsets[0], begin + offsets[1]


def _form(dtype: Any, shape: Any) -> str:
    """A tensor's type, in torch's words where it has any, and its shape."""
    names = {stored: name for name, stored in _NAMES.items()}
    return f"{names.get(str(dtype), str(dtype)[:20])} {str(shape)[:60]}"


def _check_tiling(file: str, spans: dict[str, tuple[int, int]], begin: int, end: int) -> None:
    """Every byte belongs to one tensor: nothing overlaps, nothing hides between, nothing lies outside the file."""
    at = begin
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first != at:
            what = "overlaps another tensor" if first < at else "leaves a gap before it"
            raise CheckpointError(f"{file} is refused: {name[:100]!r} {what}")
        at = last
    if at != end:
        raise CheckpointError(f"{file} is refused: its tensors end at byte {at:,}, the file at {end:,}")
