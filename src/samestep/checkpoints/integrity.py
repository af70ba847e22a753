"""A checkpoint's files as bytes: how they are written, and whether they are still what was written. No torch here.

    8 bytes   length of the header           safetensors: https://huggingface.co/docs/safetensors
    header    JSON, name -> dtype, shape, [begin, end)
    tensors   one behind the other, no gap, to the end of the file

The manifest determines the whole file but for the tensors' values: their order is that of the size of their items, the
largest first, and of their names. So a header is never parsed: it is compared with the one that the manifest implies.
Each tensor is hashed in memory before its bytes are written, so what changes on the way to the disk is found too.
PyTorch's readers check no digests: one flipped bit, or 4 KiB of zeros where a disk lost power, loads without an
error, for `torch.save` and for the distributed checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from samestep.checkpoints.directory import CheckpointDirectory, foreign_run, os_error_text
from samestep.checkpoints.grid import PAYLOAD, file_of, shape_of
from samestep.checkpoints.manifest import (
    ITEM_BYTES,
    LONGEST,
    MANIFEST,
    SAFETENSORS_NAMES,
    Manifest,
    Placeholder,
    bytes_of,
    decode,
    from_text,
)
from samestep.errors import CheckpointError
from samestep.files import open_private

_LOG = logging.getLogger("samestep.checkpoint")

_CHUNK = 1 << 20
Entries = Mapping[str, Mapping[str, Any]]  # name of a tensor -> {"dtype", "shape"}, and "sha256" where it is known


class DamageError(CheckpointError):
    """A checkpoint is not what was saved."""

    def __init__(self, message: str, file: str | None = None, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.file = file  # that is damaged, missing, or should not be there; None where it is the folder
        self.tensors = tensors  # that are damaged in it, where that is known


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
    """Returns the header of the file that holds these tensors, and the size of each in the order in which they lie."""
    names = sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name]["dtype"]], name))
    sizes = {name: bytes_of(dict(entries[name])) for name in names}
    header, at = {}, 0
    for name, size in sizes.items():
        dtype, shape = entries[name]["dtype"], entries[name]["shape"]
        pair = [2] if dtype == "complex128" else []
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": [*shape, *pair], "data_offsets": [at, at + size]}
        at += size
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the name of a tensor is no text: {error}") from error
    text += b" " * (-len(text) % 8)  # as the library does: what follows is aligned
    return len(text).to_bytes(8, "little") + text, sizes


def write_payload(path: Path, entries: Entries, data: Mapping[str, memoryview]) -> dict[str, str]:
    """Writes and syncs a file with tensors; returns the SHA-256 of each as it is in memory."""
    header, sizes = layout(entries)
    digests = {}
    with open_private(path, "xb") as file:
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
    """Opens a file of a checkpoint; refuses whatever would lead out of the folder, and all but a regular file."""
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
    """Checks that a file is what the manifest says, byte for byte; raises DamageError with the tensors that are not.

    `entries` is what :func:`payloads` returns for it. Without `digests` only its size and header are looked at.
    `progress` is called with the number of bytes read, again and again.
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


# --- whole checkpoints ---------------------------------------------------------------------------------------


def verify(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint of which every byte is as it was in memory when it was saved.

    Raises DamageError where something is missing, altered, added, or no checkpoint, and CheckpointError where it may
    not be read.
    """
    manifest = read_manifest(folder)
    check(folder, manifest)
    return manifest


def check(
    folder: Path, manifest: Manifest, *, digests: bool = True, progress: Callable[[int], None] | None = None
) -> None:
    """Does what :func:`verify` does with a manifest that is read already.

    Without `digests` only names, sizes and headers are looked at. `progress` is called as in :func:`check_payload`.
    """
    if not folder.name.startswith(f"step-{manifest.step:08d}"):
        message = f"the folder is {folder.name}, its manifest is of step {manifest.step} ({MANIFEST})"
        raise DamageError(message, MANIFEST)
    files = payloads(manifest)
    for name, entries in files.items():
        with _damage_of(name):
            check_payload(folder, name, entries, digests=digests, progress=progress)
    if extra := sorted({entry.name for entry in folder.iterdir()} - {MANIFEST, *files}):
        raise DamageError(f"{extra[0]!r} is no part of it; take it out", extra[0])
    placeholders = {name: Placeholder(name) for name in manifest.tensors}
    with _damage_of(MANIFEST):
        for tree in (*manifest.state.values(), manifest.extra):
            decode(tree, placeholders)


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest in ``folder``, its own digest checked."""
    with _damage_of(MANIFEST), open_plain(folder, MANIFEST) as file:
        if (size := os.fstat(file.fileno()).st_size) > LONGEST:
            raise CheckpointError(f"{MANIFEST} has {size:,} bytes; none has more than {LONGEST:,}")
        try:
            text = file.read(LONGEST).decode("ascii")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
        return from_text(text)


def latest_intact(directory: CheckpointDirectory) -> str | None:
    """Returns the name of the newest checkpoint that is intact; quarantines those that are not, or are foreign.

    Each quarantined one is reported by one warning of the logger ``samestep.checkpoint`` (on standard error unless the
    script configures logging). None without checkpoints; where there are some and none is intact, that is an error.
    """
    damaged = []
    for name in reversed(directory.names()):
        try:
            problem = foreign_run(verify(directory.path / name).run, directory.path)
        except DamageError as error:
            problem = f"not what was saved: {error}"
        if problem is None:
            return name
        damaged.append(directory.quarantine(name))
        _LOG.warning("%s is not used, and quarantined as %s: %s", directory.path / name, damaged[-1], problem)
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {directory.path} can be trusted, {len(damaged)} quarantined ({', '.join(damaged)}); "
            "restore one from a copy, or start again to begin from nothing"
        )
    return None


@contextmanager
def _damage_of(name: str) -> Iterator[None]:
    """Whatever is wrong within is damage of the file `name`."""
    try:
        yield
    except DamageError:
        raise
    except CheckpointError as error:
        raise DamageError(str(error), name) from error
    except PermissionError as error:
        # Not damage: whoever may read it will find it right, and nothing must be quarantined.
        raise CheckpointError(f"{error.filename or name} may not be read: permission denied") from error
    except OSError as error:
        raise DamageError(f"{name} cannot be read: {os_error_text(error)}", name) from error
