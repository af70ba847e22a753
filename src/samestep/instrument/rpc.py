"""Reports the calls of torch.distributed.rpc: the oldest that has not returned, and what runs here for other ranks.

A call whose function returns a future (`rpc.functions.async_execution`) has returned there, and not here, until that
future is completed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from datetime import timedelta
from typing import Any

from samestep.instrument.callbacks import call, listeners
from samestep.instrument.collectives import run_collective
from samestep.instrument.patch import Group, exchange, user_line, wrap
from samestep.progress import SHUTDOWN

_LEAVING_S = 10.0  # a rank that has ended meanwhile is the launcher's to tell

calls = Group()

_lock = threading.Lock()
_sent: dict[object, tuple[str, int, str]] = {}  # function, rank and line of calls that have not returned, oldest first
_served: dict[object, str] = {}  # functions that run here


@calls.on_import("torch.distributed.rpc")
def _patch_functions(module: Any) -> None:
    if module.is_available():
        changed = {
            module.init_rpc: wrap(module.init_rpc, _init_rpc, "torch"),
            module.shutdown: wrap(module.shutdown, _shutdown, "torch"),
        }
        exchange("torch.distributed.rpc", changed)


@calls.patch("torch.distributed.rpc.api", "_invoke_rpc")
def _invoke_rpc(original: Any, to: Any, func: Any, rpc_type: Any, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
    """Is below rpc_sync, rpc_async and the proxies of an RRef."""
    name = _name(func, args or ())
    if not listeners("on_rpc") or not name:
        return original(to, func, rpc_type, args, *rest, **kwargs)
    worker: Any = sys.modules["torch.distributed.rpc.api"]._to_worker_info(to)  # noqa: SLF001
    key = object()
    _note(_sent, key, (name, worker.id, user_line()))
    try:
        future = original(to, func, rpc_type, args, *rest, **kwargs)
    except BaseException:
        _note(_sent, key)
        raise
    future.add_done_callback(lambda _: _note(_sent, key))
    return future


@calls.patch("torch.distributed.rpc.internal", "_run_function")
def _run_function(original: Any, python_udf: Any) -> Any:
    """Is what the agent calls for another rank."""
    name = _name(getattr(python_udf, "func", None), getattr(python_udf, "args", ()))
    if not listeners("on_rpc") or not name:
        return original(python_udf)
    key = object()
    _note(_served, key, name)
    try:
        return original(python_udf)
    finally:
        _note(_served, key)


def _init_rpc(original: Any, *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of its own group
        run_collective(original, "init_rpc", args, kwargs)


def _shutdown(original: Any, *args: Any, **kwargs: Any) -> None:
    api: Any = sys.modules["torch.distributed.rpc.api"]
    agent = api._get_current_rpc_agent() if api._is_current_rpc_agent_set() else None  # noqa: SLF001
    key = object()
    _note(_sent, key, (SHUTDOWN, -1, user_line()))
    try:
        original(*args, **kwargs)
        is_graceful = args[0] if args else kwargs.get("graceful", True)
        if agent is not None and is_graceful and agent.is_static_group:
            _leave_last(agent)
    finally:
        _note(_sent, key)


def _leave_last(agent: Any) -> None:
    """Has rank 0, which serves the store, wait until all have left: a shutdown ends with questions to the store."""
    store, size = agent.store, len(agent.get_worker_infos())
    if store.add("samestep/left", 1) == size:
        store.set("samestep/all left", "")
    if agent.get_worker_info().id == 0:
        with contextlib.suppress(RuntimeError):  # a rank has ended before it left
            store.wait(["samestep/all left"], timedelta(seconds=_LEAVING_S))


def _name(function: Any, arguments: Any) -> str:
    """Returns the function that the script calls: of an object behind an RRef its method; "" for torch's own."""
    name: str = getattr(function, "__qualname__", str(function))
    if name.startswith("_local_invoke"):
        return str(arguments[1]) if len(arguments) > 1 else name
    module = getattr(function, "__module__", None) or ""
    return "" if module.startswith("torch.distributed.rpc") else name


def _note(held: dict[Any, Any], key: object, value: Any = None) -> None:
    with _lock:
        if value is None:
            held.pop(key, None)
        else:
            held[key] = value
        name, callee, site = next(iter(_sent.values()), ("", -1, ""))
        call("on_rpc", name, callee, site, next(iter(_served.values()), ""))
