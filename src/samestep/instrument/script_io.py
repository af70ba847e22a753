"""Reports what a script saves, loads and prints, and that it starts its ranks by itself.

`print` is the only place where every metric passes, however it was computed.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any

from samestep.instrument.callbacks import listeners, notify
from samestep.instrument.patch import on_import, patch, user_line

__all__: list[str] = []

_MAX_PRINTED = 400


def save_unreported(value: Any, path: Any) -> None:
    """Does what torch.save does, and reports nothing."""
    import torch

    getattr(torch.save, "__wrapped__", torch.save)(value, path)


def load_unreported(file: Any, *, weights_only: bool = True) -> Any:
    """Does what torch.load does, by default with tensors and plain values alone, in host memory; reports nothing."""
    import torch

    return getattr(torch.load, "__wrapped__", torch.load)(file, map_location="cpu", weights_only=weights_only)


def saves_and_loads() -> None:
    """Reports torch.save and torch.load."""
    on_import("torch", _patch_storage)


def _patch_storage(module: Any) -> None:
    @patch(module, "save")
    def save(original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            for one in listeners("on_file_write"):
                one.on_file_write(f)
        notify("save", value=obj, path=_path(f), where=user_line())
        return original(obj, f, *args, **kwargs)

    @patch(module, "load")
    def load(original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        obj = original(f, *args, **kwargs)
        notify("load", value=obj, path=_path(f), where=user_line())
        return obj


def _path(file: Any) -> str:
    return os.path.abspath(file) if isinstance(file, str | os.PathLike) else f"memory {id(file)}"  # noqa: PTH100


def prints() -> None:
    """Reports what the script prints on standard output."""

    @patch(builtins, "print")
    def print_(original: Any, *values: Any, **options: Any) -> None:
        original(*values, **options)
        if options.get("file") in {None, sys.stdout}:
            where = user_line()
            for one in listeners("on_print"):
                one.on_print(lambda: " ".join(map(str, values))[:_MAX_PRINTED], where)


def spawns() -> None:
    """Reports torch.multiprocessing's `spawn` and `start_processes`."""
    on_import("torch.multiprocessing.spawn", patch_spawn)


class _Ended:
    """Processes that have ended, as a script knows them that joins them by itself."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def patch_spawn(module: Any) -> None:
    """Changes what torch.multiprocessing.spawn calls."""

    @patch(module, "start_processes", package="torch.multiprocessing")
    def start_processes(
        original: Any, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **kwargs: Any
    ) -> Any:
        if any(one.on_spawn(fn, args, nprocs) for one in listeners("on_spawn")):
            return None if join else _Ended()
        return original(fn, args, nprocs, join, *rest, **kwargs)
