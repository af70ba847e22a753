"""Functions sent to a rank and what they gave: the rank's side of :mod:`samestep.launch.pool`.

    caller                                          rank
      Job: variables, sys.path, module, payload ->    set the variables, import the module, unpickle
      (rank 0 also: a listening socket)         ->    serve a store on it
                                                <-    ("returned", value) or ("raised", Failure)

Functions travel by cloudpickle: those of a notebook or a script by value, all others by name. Nothing but the
caller's own process can write to the socket.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from operator import methodcaller
from pathlib import Path
from types import CodeType
from typing import Any, cast

from samestep.errors import UsageError
from samestep.launch.address import serve_store
from samestep.launch.failure import FailureRecord, describe
from samestep.rankenv import child_environment, set_variables

__all__: list[str] = []

_NO_FILE = "<dynamic-code>"
"""What cloudpickle 3.1.3 makes of the file of every code it sends; tracebacks need the file."""


@dataclass(frozen=True)
class LaunchRequest:
    """One call. `module` is the name and file of the module that defines the function, where it has one."""

    variables: dict[str, str | None]
    path: list[str]
    module: tuple[str, str] | None
    payload: bytes
    brings_listener: bool


def dump_call(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickles a call.

    Raises:
        UsageError: `fn` or an argument cannot be pickled.
    """
    try:
        return dump((importable(fn), tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"{_name(fn)} cannot be sent to other processes: {error}") from error


def importable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` under the name that other processes import, where this one runs its module by `python -m`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if getattr(fn, "__module__", None) != "__main__" or spec is None or "." in fn.__qualname__:
        return fn
    return cast("Callable[..., Any]", getattr(importlib.import_module(spec.name), fn.__name__, fn))


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", fn))


def dump(value: Any) -> bytes:
    """Pickles a value; functions of a script or notebook, lambdas and closures go by value."""
    import cloudpickle  # type: ignore[import-untyped]  # not before it is needed: help answers at once

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, CodeType) and obj.co_filename != _NO_FILE:
                return methodcaller("replace", co_filename=obj.co_filename), (obj.replace(co_filename=_NO_FILE),)
            return super().reducer_override(obj)

    payload = io.BytesIO()
    Pickler(payload).dump(value)
    return payload.getvalue()


def send_job(connection: Connection, job: LaunchRequest, listener: socket.socket) -> None:
    """Sends one call; `listener` goes with it where `job.brings_listener`."""
    connection.send(job)
    if job.brings_listener:
        send_handle(connection, listener.fileno(), 0)


def serve_calls(connection: Connection, rank: int, size: int) -> None:
    """Answers calls until the caller hangs up."""
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if job.brings_listener:
            serve_store(socket.socket(fileno=recv_handle(connection)), size)
        connection.send_bytes(_answer(job, rank))


def _answer(job: LaunchRequest, rank: int) -> bytes:
    before = child_environment({})
    try:
        set_variables(job.variables)
        sys.path[:] = job.path
        _import_module(job.module)
        fn, args = pickle.loads(job.payload)  # noqa: S301  (from our own parent, over a private socket)
        return dump(("returned", fn(*args)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (it travels to the caller)
        return pickle.dumps(("raised", describe(error, rank)))
    finally:
        added = set(child_environment({})) - set(before)
        set_variables(dict.fromkeys(added) | before)


def _import_module(module: tuple[str, str] | None) -> None:
    """Imports the function's module under its own name, from its own file where the name alone does not find it."""
    if module is None or module[0] in sys.modules:
        return
    name, file = module
    if _finds(name, file):
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)


def _finds(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a parent package that only the caller's importer knows
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin) == Path(file)


def failure_of(answer: tuple[str, Any]) -> FailureRecord | None:
    """Returns why a call failed, or None where it returned."""
    return answer[1] if answer[0] == "raised" else None
