"""What distinguishes a call of a collective from others: line, shapes, type, operation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import FrameType
from typing import Any

from samestep.instrument.patch import call_site, caller, is_own

UNEVEN = {"gather", "scatter", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"}  # shapes may differ
BETWEEN_TWO = {"send", "recv", "send_object_list", "recv_object_list"}
_ROOTED = {"gather", "scatter", "gather_object", "scatter_object_list", "broadcast_object_list"}
_FILLS_NONE = {"send", "barrier", "monitored_barrier", "new_group"}
_REDUCED = {"all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
_SYNC_BATCHNORM = ("/torch/nn/modules/_functions.py", "/samestep/replicas/norm.py")


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


class CollectiveCall:
    """A call of a collective, at the script's own line `where`; `is_direct` says that no function is between.

    `layer` is "SyncBatchNorm" where such a layer calls it, forwards or backwards; "" elsewhere.
    """

    def __init__(self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = caller()
        self._function = function
        self.name, self.args, self.kwargs = name, args, kwargs
        self.where, self.is_direct = call_site(frame), is_own(frame.f_code.co_filename)
        self.layer = "" if self.is_direct else _layer_of(frame)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        return {**dict(zip(_names(self._function), self.args, strict=False)), **self.kwargs}

    @cached_property
    def tensors(self) -> list[Any]:
        named = self.arguments.items()
        return list(_tensors(value for key, value in named if "list" not in key or "object" not in self.name))

    @property
    def filled(self) -> list[Any]:
        """Those that it fills: nearly always the first argument."""
        if self.name in _FILLS_NONE or "object" in self.name:
            return []
        first = "gather_list" if self.name == "gather" else next(iter(self.arguments), "")
        return list(_tensors([self.arguments.get(first)]))

    @cached_property
    def description(self) -> dict[str, Any]:
        return {
            "op": self.name,
            "shapes": [list(tensor.shape) for tensor in self.tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors],
            "reduce": _reduction(self.arguments.get("op")) or ("SUM" if self.name in _REDUCED else None),
            "root": root_of(self.name, self.arguments),
            "of_members": bool(self.arguments.get("use_local_synchronization")),  # of a new group, by these alone
            "group": group_name(self.arguments.get("group")),
            "grad": any(tensor.requires_grad for tensor in self.tensors),
            "between_two": self.name in BETWEEN_TWO,
            "where": self.where,
        }


def _layer_of(frame: FrameType | None) -> str:
    while frame is not None and not is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(_SYNC_BATCHNORM):
            return "SyncBatchNorm"
        frame = frame.f_back
    return ""


def _tensors(values: Any) -> Iterator[Any]:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _reduction(op: Any) -> str | None:
    return None if op is None else str(op).rpartition(".")[2]


def root_of(name: str, given: Mapping[str, Any]) -> int | None:
    """Returns the rank, among all, that a call names, or that torch takes where it names none."""
    import torch.distributed as dist

    root = next((given[key] for key in ("src", "dst") if given.get(key) is not None), None)
    place = next((given[key] for key in ("group_src", "group_dst") if given.get(key) is not None), None)
    if root is None and place is not None:
        try:
            return dist.get_global_rank(given.get("group") or dist.distributed_c10d._get_default_group(), place)  # noqa: SLF001
        except (ValueError, RuntimeError):  # torch will say what is wrong
            return None
    return 0 if root is None and name in _ROOTED else root


def group_name(group: Any) -> str:
    """Returns what tells a group from others; "world" for all ranks."""
    import torch.distributed as dist

    try:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    except (ValueError, RuntimeError, KeyError, TypeError):
        return "?"
    name = "" if group is None else getattr(group, "group_name", "")
    return f"{name}:{','.join(map(str, ranks))}" if len(ranks) < dist.get_world_size() or group is not None else "world"
