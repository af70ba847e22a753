"""Reports collectives before a rank enters them, with what distinguishes two: line, shapes, type, operation.

torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL) knows no line, so two collectives of one shape may be exchanged
unnoticed; it adds communication; and in torch 2.13 it crashes DistributedDataParallel on the CPU (measured).
torch.distributed logs such calls only for itself (c10d_logger), and its flight recorder knows NCCL's alone.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from samestep.instrument.callbacks import call, listeners
from samestep.instrument.collective_call import CollectiveCall
from samestep.instrument.patch import Group, exchange, wrap

collectives = Group()  # reports collectives, and that a process group is initialised

# isend and irecv are compared by identity (torch.distributed.P2POp), and return at once.
TRACED_CALLS = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "new_group"),
    *("recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "send", "send_object_list"),
)
_inside = threading.local()  # a collective may be made of others; the outermost is the script's


@collectives.on_import("torch.distributed")
def _patch(module: Any) -> None:
    if not module.is_available():
        return
    calls = {getattr(module, name): name for name in TRACED_CALLS if hasattr(module, name)}
    changed = {original: wrap(original, functools.partial(_call, name), "torch") for original, name in calls.items()}
    changed[module.init_process_group] = wrap(module.init_process_group, _init, "torch")
    exchange("torch.distributed", changed)


def _call(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(_inside, "collective", False):
        return original(*args, **kwargs)
    _inside.collective = True
    try:
        collective = CollectiveCall(original, name, args, kwargs)
        call("before_collective", collective)
        result = _run(collective, original)
        call("after_collective", collective, waits=hasattr(result, "wait"))
    finally:
        _inside.collective = False
    return result


def _run(collective: CollectiveCall, original: Any) -> Any:
    call("on_enter_collective", collective)
    try:
        return original(*collective.args, **collective.kwargs)
    finally:
        call("on_exit_collective")


def _init(original: Any, *args: Any, **kwargs: Any) -> None:
    for one in listeners("before_init"):
        kwargs = one.before_init(kwargs)
    run_collective(original, "init_process_group", args, kwargs)
    call("after_init")


def run_collective(original: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reports that the rank enters and leaves a function that all ranks call, and none of those that it calls."""
    _inside.collective = True
    try:
        _run(CollectiveCall(original, name, args, kwargs), original)
    finally:
        _inside.collective = False
