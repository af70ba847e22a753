"""Counts the collectives of all ranks, and keeps a running digest of them: what, in which order, of which shape.

:mod:`samestep.verification.watching.collectives` tells much more of each call, which takes it some 20 microseconds; a
script that averages every gradient by hand would feel that. Here a call costs a few. Lines are kept, and not in the
digest: ranks may call one collective from two branches.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from types import ModuleType
from typing import Any

import xxhash

from samestep.launch.imports import replace_function
from samestep.launch.noting import TRACED_CALLS, call_site
from samestep.verification.watching.collectives import BETWEEN_TWO, UNEVEN, root_of

__all__: list[str] = []

KEPT = 64  # calls, among which the first that differs is looked for
_ROOTS = {"broadcast": 1, "reduce": 1, "broadcast_object_list": 1, "gather": 2, "scatter": 2}  # its place in a call
_ROOTS |= {"gather_object": 2, "scatter_object_list": 2}
_inside = threading.local()


class Calls:
    """Those that this process has made."""

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self._last: deque[tuple[int, str, str, Any, str]] = deque(maxlen=KEPT)
        self._world: int | None = None

    def watch(self, module: ModuleType) -> None:
        """Changes the functions of torch.distributed."""
        if not module.is_available():
            return
        names = [name for name in TRACED_CALLS if hasattr(module, name) and name not in BETWEEN_TWO]
        calls = {getattr(module, name): name for name in names}
        replace_function("torch.distributed", {call: self._counting(call, name) for call, name in calls.items()})

    def _counting(self, original: Any, name: str) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            import torch

            if getattr(_inside, "one", False) or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            _inside.one = True
            try:
                if threading.current_thread() is threading.main_thread():  # another thread's come in between somewhere
                    self._count(name, args, kwargs, sys._getframe(1))  # noqa: SLF001
                return original(*args, **kwargs)
            finally:
                _inside.one = False

        return call

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> None:
        if not _is_of_all(args, kwargs):
            return
        form = _form(name, args, kwargs)
        root = _root(name, args, kwargs)
        self.digest = xxhash.xxh3_64_intdigest(f"{self.digest}{name}{form}{root}".encode())
        self._last.append((self.count, name, form, root, call_site(frame)))
        self.count += 1

    def last(self) -> list[dict[str, Any]]:
        """Returns the last ones, in the words of `watching.collectives`."""
        return [
            {"kind": "collective", "index": index, "op": name, "shapes": [form] if form else [], "dtypes": [""]}
            | {"root": root, "reduce": None, "group": "all", "where": where, "window": index, "between_two": False}
            for index, name, form, root, where in self._last
        ]


def _is_of_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all ranks take part: what some of them do among each other, the others need not."""
    import torch.distributed as dist

    group = kwargs.get("group") or next((one for one in args if isinstance(one, dist.ProcessGroup)), None)
    return group is None or group is dist.group.WORLD or group.size() == dist.get_world_size()


def _form(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Type and shape of what is sent, where they have to be equal on all ranks."""
    tensor: Any = args[0] if args else kwargs.get("tensor", kwargs.get("input_tensor"))
    tensor = tensor[0] if isinstance(tensor, list | tuple) and tensor else tensor
    if not hasattr(tensor, "dtype") or "object" in name:
        return ""
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind if name in UNEVEN else f"{kind} {list(tensor.shape)}"


def _root(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    place = _ROOTS.get(name)
    if place is None:
        return None
    return args[place] if len(args) > place and isinstance(args[place], int) else root_of(name, kwargs)
