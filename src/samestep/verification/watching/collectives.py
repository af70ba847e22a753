"""Tells of collectives before a rank enters them, with what tells two apart: call site, shapes, type, operation.

torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL) knows no call site, so two collectives of one shape may be exchanged
unnoticed; it adds communication; and in torch 2.13 it crashes DistributedDataParallel on the CPU (measured).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from samestep.launch.imports import replace_function
from samestep.launch.noting import TRACED_CALLS, call_site
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []

UNEVEN = {"gather", "scatter", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"}  # shapes may differ
BETWEEN_TWO = {"send", "recv", "send_object_list", "recv_object_list"}
_ROOTED = {"gather", "scatter", "gather_object", "scatter_object_list", "broadcast_object_list"}
_REDUCED = {"all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
_inside = threading.local()


def watch(listener: Callbacks, module: ModuleType) -> None:
    """Changes the functions of torch.distributed."""
    if not module.is_available():
        return
    calls = {getattr(module, name): name for name in TRACED_CALLS if hasattr(module, name)}
    changed = {call: _telling(listener, call, name, between_two=name in BETWEEN_TWO) for call, name in calls.items()}
    replace_function("torch.distributed", changed)


def _telling(listener: Callbacks, original: Any, name: str, *, between_two: bool) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        if getattr(_inside, "one", False) or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        told, tensors = _described(signature, name, args, kwargs)
        told |= {"between_two": between_two, "where": call_site(sys._getframe(1))}  # noqa: SLF001
        _inside.one = True
        try:
            listener.collective(told)
            result = original(*args, **kwargs)
            listener.collected(told, tensors, waits=hasattr(result, "wait"))
        finally:
            _inside.one = False
        return result

    return call


def _described(signature: inspect.Signature, name: str, args: Any, kwargs: Any) -> tuple[dict[str, Any], list[Any]]:
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the original says what is wrong
        given = {}
    tensors = list(_tensors(value for key, value in given.items() if "list" not in key or "object" not in name))
    group = given.get("group")
    told = {
        "op": name,
        "shapes": [list(tensor.shape) for tensor in tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "reduce": _reduction(given.get("op")) or ("SUM" if name in _REDUCED else None),
        "root": root_of(name, given),
        "group": _group(group),
        "grad": any(tensor.requires_grad for tensor in tensors),
    }
    return told, tensors


def _tensors(values: Any) -> Any:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _reduction(op: Any) -> str | None:
    return None if op is None else str(op).rpartition(".")[2]


def root_of(name: str, given: Mapping[str, Any]) -> int | None:
    """Returns the rank, among all, that a call names or means: who leaves out what torch takes anyway does the same.

    Args:
        name: of the function.
        given: its arguments, by name.
    """
    import torch.distributed as dist

    root = next((given[key] for key in ("src", "dst") if given.get(key) is not None), None)
    place = next((given[key] for key in ("group_src", "group_dst") if given.get(key) is not None), None)
    if root is None and place is not None:
        try:
            return dist.get_global_rank(given.get("group") or dist.distributed_c10d._get_default_group(), place)  # noqa: SLF001
        except (ValueError, RuntimeError):  # torch will say what is wrong
            return None
    return 0 if root is None and name in _ROOTED else root


def _group(group: Any) -> str:
    import torch.distributed as dist

    try:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    except (ValueError, RuntimeError, KeyError, TypeError):
        return "?"
    name = "" if group is None else getattr(group, "group_name", "")
    return f"{name}:{','.join(map(str, ranks))}" if len(ranks) < dist.get_world_size() or group is not None else "world"
