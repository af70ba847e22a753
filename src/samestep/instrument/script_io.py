"""Reports what a script saves, loads and prints, and that it starts its ranks by itself.

Every metric passes `print` or `logging`, however it was computed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from samestep.instrument.callbacks import call, listeners, notify
from samestep.instrument.patch import Group, is_own, user_line
from samestep.launch.rank.user_code import relative_path

saves_and_loads = Group()  # reports torch.save, torch.load, and save of torch.distributed.checkpoint
prints = Group()  # what the script prints on standard output, or logs
spawns = Group()  # torch.multiprocessing's `spawn` and `start_processes`, and Process.start

_MAX_PRINTED = 400


def save_unreported(value: Any, path: Any) -> None:
    import torch

    getattr(torch.save, "__wrapped__", torch.save)(value, path)


def load_unreported(file: Any, *, weights_only: bool = True) -> Any:
    """Does what torch.load does, by default with tensors and plain values alone, in host memory; reports nothing."""
    import torch

    return getattr(torch.load, "__wrapped__", torch.load)(file, map_location="cpu", weights_only=weights_only)


@saves_and_loads.patch("torch", "save")
def _save(original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(f, str | os.PathLike):
        call("on_file_write", f)
    notify("save", value=obj, path=_path(f), where=user_line())
    return original(obj, f, *args, **kwargs)


@saves_and_loads.patch("torch", "load")
def _load(original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    obj = original(f, *args, **kwargs)
    notify("load", value=obj, path=_path(f), where=user_line())
    return obj


@saves_and_loads.patch("torch.distributed.checkpoint.state_dict_saver", "save", package="torch.distributed.checkpoint")
def _save_together(original: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    notify("save_together", value=state_dict, where=user_line())
    return original(state_dict, *args, **kwargs)


def _path(file: Any) -> str:
    return os.path.abspath(file) if isinstance(file, str | os.PathLike) else f"memory {id(file)}"  # noqa: PTH100


@prints.patch("builtins", "print")
def _print(original: Any, *values: Any, **options: Any) -> None:
    original(*values, **options)
    if options.get("file") in {None, sys.stdout}:
        call("on_print", lambda: " ".join(map(str, values))[:_MAX_PRINTED], user_line())


@prints.patch("logging", "Logger.handle")
def _handle(original: Any, logger: Any, record: Any) -> None:
    original(logger, record)
    if is_own(record.pathname):
        call(
            "on_print", lambda: record.getMessage()[:_MAX_PRINTED], f"{relative_path(record.pathname)}:{record.lineno}"
        )


class _Ended:
    """Processes that have ended, as a script knows them that joins them by itself."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


@spawns.patch("torch.multiprocessing.spawn", "start_processes", package="torch.multiprocessing")
def _start_processes(
    original: Any, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **kwargs: Any
) -> Any:
    if any(one.on_spawn(fn, args, nprocs) for one in listeners("on_spawn")):
        return None if join else _Ended()
    return original(fn, args, nprocs, join, *rest, **kwargs)


class _EndedPopen:
    """What a `multiprocessing.Process` holds of its process, of one that has ended with exit code 0."""

    pid = os.getpid()
    sentinel = -1
    returncode = 0

    def poll(self, *_: Any) -> int:
        return 0

    def wait(self, *_: Any, **__: Any) -> int:
        return 0

    def close(self) -> None: ...

    terminate = kill = close


@spawns.patch("multiprocessing.process", "BaseProcess.start")
def _start(original: Any, process: Any) -> None:
    if any(one.on_process(process) for one in listeners("on_process")):
        process._popen = _EndedPopen()  # noqa: SLF001
        return
    original(process)
