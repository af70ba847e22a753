"""A file that is there whole or not at all: written under another name beside it, and then renamed.

What is no plain file of its own (/dev/stdout, a pipe, somebody's link) stays what it is, and is written through.
"""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from samestep.errors import UsageError

__all__: list[str] = []


def write_atomic(path: Path, pieces: Iterable[str]) -> None:
    """Writes a text; compressed, if it is a plain file whose name ends in .gz.

    Raises:
        UsageError: it cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            _write(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666), pieces, compressed=False)
            return
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        try:
            _write(descriptor, pieces, compressed=path.suffix == ".gz")
            Path(draft).chmod(0o666 & ~_mask())
            Path(draft).replace(path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _write(descriptor: int, pieces: Iterable[str], *, compressed: bool) -> None:
    with os.fdopen(descriptor, "wb") as raw:
        if not compressed:
            raw.writelines(piece.encode(errors="backslashreplace") for piece in pieces)
            return
        with gzip.open(raw, "wb", compresslevel=4) as packed:
            packed.writelines(piece.encode(errors="backslashreplace") for piece in pieces)


def _mask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
