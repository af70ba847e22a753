"""A private view of folders: what this process and its children write there is kept elsewhere, by overlayfs.

So every run of `samestep verify` finds the files as the first one found them, and none changes a file of the user.
Since Linux 5.11 this needs no privileges. Sources: overlayfs.rst of Linux; user_namespaces(7), mount(2).
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samestep.launch.cpus import unescape

VARIABLE = "SAMESTEP_OVERLAY"  # of `samestep run`: {"folders": […], "store": folder}
RESULT = "overlay.txt"  # in the store: why it is not private, or empty
_NEWNS, _NEWUSER = 0x00020000, 0x10000000  # of unshare(2)
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000  # of mount(2)
_SEPARATORS = set(",:\\")  # of overlayfs's options

_libc = ctypes.CDLL(None, use_errno=True)


def apply(options: str) -> None:
    """Gives this process, which must have one thread, a private view, and writes to the store why it could not."""
    given = json.loads(options)
    store = Path(given["store"])
    store.mkdir(parents=True, exist_ok=True)
    folders = [Path(folder) for folder in given["folders"]]
    result = store / RESULT
    if (child := os.fork()) == 0:  # a try: a process that is half way into a namespace cannot leave it
        try:
            mount_overlays(folders, store / "try")
            os._exit(0)
        except OSError as error:
            result.write_text(f"{error.filename or 'overlayfs'}: {error.strerror}", encoding="utf-8")
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] == 0:
        mount_overlays(folders, store)
        result.write_text("", encoding="utf-8")


def mount_overlays(folders: Sequence[Path], store: Path) -> None:
    """Mounts an overlay over each folder, in a mount namespace of this process.

    File systems that are mounted below a folder are not part of its overlay: they are mounted again, and writes there
    are real.

    `store` is for what is written, outside of the folders; one below another belongs to that one's overlay.

    Raises:
        OSError: the kernel does not let this process do it, or `store` lies in a folder; no folder is private then
            that comes after the first one that failed.
    """
    here = Path.cwd()
    _enter_namespace()
    for number, folder in enumerate(_outermost(folders)):
        if store.resolve().is_relative_to(folder):
            raise OSError(0, "temporary files lie in the folder itself", str(folder))
        upper, work = store / f"{number}" / "upper", store / f"{number}" / "work"
        if _SEPARATORS & set(f"{folder}{upper}"):
            raise OSError(0, "its name has a comma, a colon or a backslash", str(folder))
        for one in (upper, work):
            one.mkdir(parents=True, exist_ok=True)
        with _kept_mounts(folder):
            options = f"lowerdir={folder},upperdir={upper},workdir={work}"
            _mount_overlay(folder, options)
    os.chdir(here)  # the working directory was below the overlay until now


def _outermost(folders: Sequence[Path]) -> list[Path]:
    real = sorted({folder.resolve() for folder in folders})
    return [one for one in real if not any(one.is_relative_to(other) for other in real if other != one)]


def _enter_namespace() -> None:
    """Enters a mount namespace: of this user namespace where that is allowed, else of a new one."""
    user, group = os.geteuid(), os.getegid()
    try:
        _check(_libc.unshare(_NEWNS), "unshare")
    except PermissionError:
        _check(_libc.unshare(_NEWUSER | _NEWNS), "unshare")
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    _mount("none", "/", None, _REC | _PRIVATE, None)


@contextmanager
def _kept_mounts(folder: Path) -> Iterator[None]:
    """Mounts again what was mounted below the folder, since an overlay shows one file system only."""
    handles = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in _mounted_below(folder)]
    try:
        yield
        for path, handle in handles:
            _mount(f"/proc/self/fd/{handle}", str(path), None, _BIND | _REC, None)
    finally:
        for _, handle in handles:
            os.close(handle)


def _mounted_below(folder: Path) -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    points = {Path(unescape(line.split()[4])) for line in lines}
    return _outermost([point for point in points if point != folder and point.is_relative_to(folder)])


def _mount_overlay(folder: Path, options: str) -> None:
    try:
        _mount("overlay", str(folder), "overlay", 0, f"{options},userxattr")  # all that a user namespace may use
    except OSError:
        _mount("overlay", str(folder), "overlay", 0, options)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), target)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
