"""The file with the tensors, as bytes: where each one lies, and which of them are damaged. No torch here.

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
from samestep.running.checkpoints.manifest import LONGEST, PAYLOAD, Manifest, bytes_of, parsed

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


def check_header(folder: Path, manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Returns name -> (first byte, byte after the last) of every tensor, after checking all of them.

    Raises:
        CheckpointError: the header is no header, or describes other tensors than the manifest.
    """
    with open_plain(folder, PAYLOAD) as file:
        begin, header = _header(file)
        end = os.fstat(file.fileno()).st_size
    header.pop(_METADATA, None)
    expected = {name: _stored(entry) for name, entry in manifest.tensors.items()}
    if odd := sorted(header.keys() ^ expected.keys()):
        where = "the manifest only" if odd[0] in expected else "the payload only"
        raise CheckpointError(f"{PAYLOAD} cannot be read: {odd[0][:100]!r} is in {where}")
    spans = {}
    for name, entry in header.items():
        spans[name] = _span(name, entry, expected[name], begin)
    _check_tiling(spans, begin, end)
    for name, place in manifest.places.items():
        if spans[name] != tuple(place[:2]):
            raise CheckpointError(f"{PAYLOAD} has {name[:100]!r} at another place than the manifest")
    return spans


def measure(folder: Path, progress: Callable[[int], None] | None = None) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Reads the payload once, and returns its entries of `Manifest.files` and of `Manifest.places`.

    Args:
        folder: of a checkpoint, or of one that is being written.
        progress: told the number of bytes read, again and again.
    """
    with open_plain(folder, PAYLOAD) as file:
        begin, header = _header(file)
        header.pop(_METADATA, None)
        spans = sorted((begin + e["data_offsets"][0], begin + e["data_offsets"][1], name) for name, e in header.items())
        file.seek(0)
        whole = hashlib.sha256(file.read(begin))
        places = {}
        for first, last, name in spans:
            checksum = 0
            for piece in pieces(file, last - first):
                whole.update(piece)
                checksum = zlib.crc32(piece, checksum)
                if progress is not None:
                    progress(len(piece))
            places[name] = [first, last, checksum]
        size = file.tell()
    return {PAYLOAD: {"size": size, "sha256": whole.hexdigest()}}, places


def damaged_tensors(folder: Path, manifest: Manifest) -> list[str]:
    """Returns the names of the tensors whose bytes are not those that were saved; empty too where nobody can say."""
    with open_plain(folder, PAYLOAD) as file:
        return [name for name, place in manifest.places.items() if not _is_whole(file, *place)]


def _is_whole(file: BinaryIO, begin: int, end: int, saved: int) -> bool:
    file.seek(begin)
    checksum, count = 0, 0
    for piece in pieces(file, end - begin):
        checksum, count = zlib.crc32(piece, checksum), count + len(piece)
    return (checksum, count) == (saved, end - begin)


def _header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Returns where the tensors begin, and the header."""
    length = int.from_bytes(file.read(8), "little")
    rest = os.fstat(file.fileno()).st_size - 8
    if not 2 <= length <= rest:
        raise CheckpointError(f"{PAYLOAD} has a header of {length:,} bytes, which cannot be ({max(rest, 0):,} follow)")
    if length > LONGEST:
        raise CheckpointError(f"{PAYLOAD} has a header of {length:,} bytes; none has more than {LONGEST:,}")
    try:
        text = file.read(length).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{PAYLOAD} has a damaged header: {error}") from error
    return 8 + length, parsed(text, f"the header of {PAYLOAD}")


def _stored(described: dict[str, Any]) -> tuple[str, list[int], int]:
    """What the header says of a tensor that the manifest describes."""
    if described["dtype"] == "complex128":
        return "F64", [*described["shape"], 2], bytes_of(described)
    return _NAMES[described["dtype"]], described["shape"], bytes_of(described)


def _span(name: str, entry: Any, expected: tuple[str, list[int], int], begin: int) -> tuple[int, int]:
    dtype, shape, size = expected
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{PAYLOAD} does not describe {name[:100]!r}")
    if entry["dtype"] != dtype or entry["shape"] != shape:
        found, listed = _form(entry["dtype"], entry["shape"]), _form(dtype, shape)
        raise CheckpointError(f"{PAYLOAD} holds {name[:100]} as {found}, the manifest says {listed}")
    offsets = entry["data_offsets"]
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)):
        raise CheckpointError(f"{PAYLOAD} has no place for {name[:100]!r}")
    if offsets[1] - offsets[0] != size:
        raise CheckpointError(f"{PAYLOAD} gives {name[:100]!r} {str(offsets)[:60]}, which are not its {size:,} bytes")
    return begin + offsets[0], begin + offsets[1]


def _form(dtype: Any, shape: Any) -> str:
    """A tensor's type, in torch's words where it has any, and its shape."""
    names = {stored: name for name, stored in _NAMES.items()}
    return f"{names.get(str(dtype), str(dtype)[:20])} {str(shape)[:60]}"


def _check_tiling(spans: dict[str, tuple[int, int]], begin: int, end: int) -> None:
    """Every byte belongs to one tensor: nothing overlaps, nothing hides between, nothing lies outside the file."""
    at = begin
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first != at:
            what = "overlaps another tensor" if first < at else "leaves a gap before it"
            raise CheckpointError(f"{PAYLOAD} is refused: {name[:100]!r} {what}")
        at = last
    if at != end:
        raise CheckpointError(f"{PAYLOAD} is refused: its tensors end at byte {at:,}, the file at {end:,}")
