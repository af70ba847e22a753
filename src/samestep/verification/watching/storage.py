"""Tells of what a script saves and loads by `torch.save` and `torch.load`."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from samestep.launch.imports import when_imported
from samestep.launch.noting import call_site
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []


def save_unseen(value: Any, path: Any) -> None:
    """Does what torch.save does, and tells nobody."""
    import torch

    getattr(torch.save, "__wrapped__", torch.save)(value, path)


def load_unseen(file: Any, *, weights_only: bool = True) -> Any:
    """Does what torch.load does, by default with tensors and plain values alone, in host memory; tells nobody."""
    import torch

    return getattr(torch.load, "__wrapped__", torch.load)(file, map_location="cpu", weights_only=weights_only)


def watch(listener: Callbacks) -> None:
    """Changes torch.save and torch.load as soon as they are imported."""
    when_imported("torch", functools.partial(_watch, listener))


def _watch(listener: Callbacks, module: Any) -> None:
    save, load = module.save, module.load

    @functools.wraps(save)
    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            listener.writes_file(f)
        _tell(listener, "save", obj, f)
        return save(obj, f, *args, **kwargs)

    @functools.wraps(load)
    def loading(f: Any, *args: Any, **kwargs: Any) -> Any:
        obj = load(f, *args, **kwargs)
        _tell(listener, "load", obj, f)
        return obj

    module.save, module.load = saving, loading


def _tell(listener: Callbacks, kind: str, value: Any, file: Any) -> None:
    path = os.path.abspath(file) if isinstance(file, str | os.PathLike) else f"memory {id(file)}"  # noqa: PTH100
    listener.told(kind, value=value, path=path, where=call_site(sys._getframe(2)))  # noqa: SLF001
