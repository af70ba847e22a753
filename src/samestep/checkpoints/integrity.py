"""Whether a checkpoint is what was saved, and if not, which file and which tensors are not. No torch here.

    quick    manifest: its own SHA-256.   Files: all there, no others, their sizes and headers
    whole    the same, and the SHA-256 of every tensor

PyTorch's readers check no digests: one flipped bit, or 4 KiB of zeros where a disk lost power, loads without an
error, for `torch.save` and for the distributed checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from samestep.checkpoints.directory import CheckpointDirectory, foreign_run, os_error_text
from samestep.checkpoints.manifest import LONGEST, MANIFEST, Manifest, from_text
from samestep.checkpoints.payload import DamageError, check_payload, open_plain, payloads
from samestep.checkpoints.tree import decode
from samestep.errors import CheckpointError

_LOG = logging.getLogger("samestep.checkpoint")
_Result = TypeVar("_Result")


def verify(folder: Path, *, digests: bool = True, progress: Callable[[int], None] | None = None) -> Manifest:
    """Returns the manifest of a checkpoint of which every byte is as it was in memory when it was saved.

    Args:
        folder: of the checkpoint.
        digests: False leaves out the tensors, and looks at names, sizes and headers only.
        progress: called with the number of bytes read, again and again.

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
    files = payloads(manifest)
    for name, entries in files.items():
        _in_file(name, partial(check_payload, folder, name, entries, digests=digests, progress=progress))
    if extra := sorted({entry.name for entry in folder.iterdir()} - {MANIFEST, *files}):
        raise DamageError(f"{extra[0]!r} is no part of it; take it out", extra[0])
    _in_file(MANIFEST, partial(_check_trees, manifest))


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest in ``folder``, its own digest checked.

    Raises:
        DamageError: it is missing, damaged, or of another schema.
    """
    return _in_file(MANIFEST, lambda: from_text(_manifest_text(folder)))


def latest_intact(directory: CheckpointDirectory) -> str | None:
    """Returns the name of the newest checkpoint that is intact; quarantines those that are not, or are foreign.

    Each quarantined one is reported by one warning of the logger ``samestep.checkpoint`` (on standard error unless
    the script configures logging).

    Raises:
        CheckpointError: there are checkpoints and none of them is intact, or one may not be read.
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
        raise DamageError(f"{name} cannot be read: {os_error_text(error)}", name) from error


def _manifest_text(folder: Path) -> str:
    with open_plain(folder, MANIFEST) as file:
        if (size := os.fstat(file.fileno()).st_size) > LONGEST:
            raise CheckpointError(f"{MANIFEST} has {size:,} bytes; none has more than {LONGEST:,}")
        try:
            return file.read(LONGEST).decode("ascii")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error


class _Placeholder:
    """Stands for a tensor while a tree is only checked."""

    def numpy(self) -> _Placeholder:
        return self


def _check_trees(manifest: Manifest) -> None:
    tensors: dict[str, Any] = dict.fromkeys(manifest.tensors, _Placeholder())
    for tree in (*manifest.state.values(), manifest.extra):
        decode(tree, tensors)
