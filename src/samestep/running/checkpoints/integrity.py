"""Whether a checkpoint is what was saved, and if not, which file and which tensors are not. No torch here.

    quick    manifest: its own SHA-256.   Files: all there, no others, their sizes.   Payload: its header
    whole    the same, and the SHA-256 of every byte

There may be several payloads, one of each rank that held parts of tensors; each must hold what the manifest says of it.

PyTorch's readers check no digests: one flipped bit, or 4 KiB of zeros where a disk lost power, loads without a
word (measured on torch 2.13, for `torch.save` and for the distributed checkpoint).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from samestep.errors import CheckpointError
from samestep.running.checkpoints.directory import reason
from samestep.running.checkpoints.layout import Payload, payloads
from samestep.running.checkpoints.manifest import LONGEST, MANIFEST, Manifest, from_text
from samestep.running.checkpoints.payload import check_header, damaged_tensors, open_plain, pieces
from samestep.running.checkpoints.tree import decode

__all__ = ["DamageError", "read_manifest", "verify"]

_MOST_NAMED = 3

_Result = TypeVar("_Result")


class DamageError(CheckpointError):
    """A checkpoint is not what was saved.

    Attributes:
        file: the file that is damaged, missing, or should not be there; None where it is the folder.
        tensors: the tensors in it that are damaged, where that is known.
    """

    def __init__(self, message: str, file: str | None = None, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.file = file
        self.tensors = tuple(tensors)


class ForeignError(DamageError):
    """A checkpoint is as it was saved, but by another run than the one whose directory it lies in."""


def verify(folder: Path, *, digests: bool = True, progress: Callable[[int], None] | None = None) -> Manifest:
    """Returns the manifest of a checkpoint of which every byte is as it was written.

    Args:
        folder: of the checkpoint.
        digests: False leaves the digests of the files out, and only their names, sizes and headers are looked at.
        progress: told the number of bytes read, again and again.

    Raises:
        DamageError: something is missing, altered, added, or not a checkpoint; says what.
        CheckpointError: it may not be read.
    """
    manifest = read_manifest(folder)
    check(folder, manifest, digests=digests, progress=progress)
    return manifest


def check(
    folder: Path, manifest: Manifest, *, digests: bool = True, progress: Callable[[int], None] | None = None
) -> None:
    """Does what :func:`verify` does with a manifest that is read already."""
    if not folder.name.startswith(f"step-{manifest.step:08d}"):
        message = f"the folder is {folder.name}, its manifest is of step {manifest.step} ({MANIFEST})"
        raise DamageError(message, MANIFEST)
    held = payloads(manifest)
    for name, expected in manifest.files.items():
        _in_file(name, partial(_check_size, folder, name, expected["size"], held.get(name)))
        if digests:
            _in_file(name, partial(_check_digest, folder, name, expected, held.get(name), progress))
    _check_names(folder, manifest)
    for name, payload in held.items():
        _in_file(name, partial(check_header, folder, payload))
    _in_file(MANIFEST, partial(_check_trees, manifest))


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest in ``folder``, its own digest checked.

    Raises:
        DamageError: it is missing, damaged, or of another schema.
    """
    return _in_file(MANIFEST, lambda: from_text(_manifest_text(folder)))


def _in_file(name: str, action: Callable[[], _Result]) -> _Result:
    """Returns what `action` returns; whatever is wrong is damage of the file `name`."""
    try:
        return action()
    except DamageError:
        raise
    except CheckpointError as error:
        raise DamageError(str(error), name) from error
    except PermissionError as error:
        # Not damage: whoever may read it will find it right, and nothing must be quarantined.
        raise CheckpointError(f"{error.filename or name} may not be read: permission denied") from error
    except OSError as error:
        raise DamageError(f"{name} cannot be read: {reason(error)}", name) from error


def _manifest_text(folder: Path) -> str:
    with open_plain(folder, MANIFEST) as file:
        if (size := os.fstat(file.fileno()).st_size) > LONGEST:
            raise CheckpointError(f"{MANIFEST} has {size:,} bytes; none has more than {LONGEST:,}")
        try:
            return file.read(LONGEST).decode("ascii")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error


def _check_names(folder: Path, manifest: Manifest) -> None:
    extra = sorted({entry.name for entry in folder.iterdir()} - {MANIFEST, *manifest.files})
    if extra:
        raise DamageError(f"{extra[0]!r} is no part of it; take it out", extra[0])


class _StandIn:
    """Stands for a tensor while a tree is only checked."""

    def numpy(self) -> _StandIn:
        return self


def _check_trees(manifest: Manifest) -> None:
    tensors = dict.fromkeys(manifest.tensors, _StandIn())
    for tree in (*manifest.state.values(), manifest.random):
        decode(tree, tensors)


def _check_size(folder: Path, name: str, expected: int, payload: Payload | None) -> None:
    with open_plain(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise _with_tensors(f"{name} has {size:,} bytes instead of {expected:,}", folder, name, payload)


def _check_digest(
    folder: Path, name: str, expected: dict[str, Any], payload: Payload | None, progress: Callable[[int], None] | None
) -> None:
    whole = hashlib.sha256()
    with open_plain(folder, name) as file:
        for piece in pieces(file, expected["size"]):
            whole.update(piece)
            if progress is not None:
                progress(len(piece))
    if (found := whole.hexdigest()) != expected["sha256"]:
        message = f"{name} has SHA-256 {found[:12]}… instead of {expected['sha256'][:12]}…"
        raise _with_tensors(message, folder, name, payload)


def _with_tensors(message: str, folder: Path, name: str, payload: Payload | None) -> DamageError:
    if payload is None or not any(payload.places()):
        return DamageError(message, name)
    damaged = damaged_tensors(folder, payload)
    if not damaged:
        return DamageError(f"{message}; every tensor in it is whole", name)
    if len(damaged) == len(payload.held) > 1:
        return DamageError(f"{message}; none of its {len(damaged)} tensors is what was saved", name, damaged)
    more = f" and {len(damaged) - _MOST_NAMED} more" if len(damaged) > _MOST_NAMED else ""
    return DamageError(f"{message}; damaged: {', '.join(damaged[:_MOST_NAMED])}{more}", name, damaged)
