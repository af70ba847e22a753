"""Writing files: whole or not at all, and readable by their user alone."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from samestep.errors import UsageError


def write_atomic(path: Path, pieces: Iterable[str]) -> None:
    """Writes a user's file under another name beside it, then renames it; compressed, if its name ends in .gz.

    What is no plain file (/dev/stdout, a pipe, a link) stays what it is, and is written through.

    Raises:
        UsageError: it cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            _write(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666), pieces, compressed=False)
        else:
            _replace(path, pieces, compressed=path.suffix == ".gz", mode=0o666 & ~_umask())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def write_private(path: Path, text: str) -> None:
    """Writes a text that only this user can read, whole or not at all."""
    _replace(path, [text], compressed=False, mode=0o600)


def _replace(path: Path, pieces: Iterable[str], *, compressed: bool, mode: int) -> None:
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        _write(descriptor, pieces, compressed=compressed)
        Path(draft).chmod(mode)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _write(descriptor: int, pieces: Iterable[str], *, compressed: bool) -> None:
    with os.fdopen(descriptor, "wb") as raw:
        if not compressed:
            raw.writelines(piece.encode(errors="backslashreplace") for piece in pieces)
            return
        with gzip.open(raw, "wb", compresslevel=4) as packed:
            packed.writelines(piece.encode(errors="backslashreplace") for piece in pieces)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def make_private(path: Path) -> None:
    """Makes a directory that only its user can enter; an existing one is left as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, mode: str, **more: Any) -> IO[Any]:
    """Opens a file; if it is new, only its user can read it, whatever the umask and the directory."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    return open(path, mode, opener=opener, **more)  # the caller closes it
