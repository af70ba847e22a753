"""Notes files before the script writes them, so that they can be restored.

Python raises an audit event before it opens, moves or removes a file; torch.save, which opens its own, is patched.
Others that write from native code (safetensors) are seen only where an overlay keeps them apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30  # of a file that is copied before it is changed
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_ELSEWHERE = ("/dev/", "/proc/", "/sys/", "/run/")
_CACHES = ("/__pycache__/", "/torchinductor_", "/.cache/", "/.triton/")  # that no training resumes from


class Writes:
    """Notes what this process, and what it forks, is about to write, outside of some folders.

    The ranks of a run share the `store` of notes and copies.
    """

    def __init__(self, store: Path, ignored: Sequence[str]) -> None:
        self._store = store
        self._ignored = tuple(f"{folder.rstrip('/')}/" for folder in ignored) + _ELSEWHERE
        self._known: set[str] = set()
        self._inside = threading.local()

    @classmethod
    def watch(cls, order: dict[str, Any]) -> Writes | None:
        """Watches from now on, as `order` says; None where it says nothing."""
        if order.get("written") is None:
            return None
        result, *folders = order["overlay"]
        has_overlay = os.path.exists(result) and not os.path.getsize(result)  # noqa: PTH110, PTH202
        writes = cls(Path(order["written"]), [order["unnoted"], *(folders if has_overlay else [])])
        sys.addaudithook(writes.hear)
        return writes

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if flags & _WRITES and isinstance(path, str | bytes):
                self.note(path)
        elif event == "os.rename":
            source, target = _located(args[0], args[2]), _located(args[1], args[3])
            self.note(source)
            self.note(target, moved_from=source)
        elif event in {"os.remove", "os.mkdir"}:
            self.note(_located(args[0], args[-1]), is_folder=event == "os.mkdir")
        elif event == "os.truncate" and isinstance(args[0], str | bytes):
            self.note(args[0])

    def note(
        self, path: str | bytes | os.PathLike[str], *, is_folder: bool = False, moved_from: str | None = None
    ) -> None:
        """Notes a file that is about to be written or removed, or a folder that is made, and copies what is there."""
        if getattr(self._inside, "one", False):
            return
        self._inside.one = True
        try:
            name = os.path.realpath(os.fsdecode(path))
            if name in self._known or name.startswith(self._ignored) or any(cache in name for cache in _CACHES):
                return
            self._known.add(name)
            with contextlib.suppress(OSError):
                self._write(name, is_folder=is_folder, moved_from=moved_from)
        finally:
            self._inside.one = False

    def _write(self, name: str, *, is_folder: bool, moved_from: str | None) -> None:
        with (self._store / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            note, key = self._note_of(name), _key(name)
            if note.exists():
                return
            kind, copy = "folder" if is_folder else "new", None
            if moved_from is not None and not self._can_come_back(os.path.realpath(moved_from)):
                kind = "moved"
            if os.path.lexists(name):
                if not os.path.isfile(name):  # noqa: PTH113
                    return  # a folder that is there already, a device, a socket
                kind = "old"
                if os.path.getsize(name) <= MOST_BYTES:  # noqa: PTH202
                    copy = str(self._store / f"{key}.copy")
                    shutil.copy2(name, copy)
            note.write_text(json.dumps({"path": name, "kind": kind, "copy": copy}), encoding="utf-8")

    def _note_of(self, name: str) -> Path:
        return self._store / f"{_key(name)}.json"

    def _can_come_back(self, source: str) -> bool:
        """Whether what is moved from here was made by this run, or has a copy: else it must not be taken away."""
        try:
            note = json.loads(self._note_of(source).read_text(encoding="utf-8"))
        except OSError:
            return False
        return note["kind"] in {"new", "folder"} or note["copy"] is not None


def _key(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:24]


def _located(path: str | bytes, folder: int) -> str:
    """Returns a path that may be relative to an open folder, as shutil.rmtree names files; -1: to no folder."""
    name = os.fsdecode(path)
    return name if folder < 0 else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)  # noqa: PTH115, PTH118
