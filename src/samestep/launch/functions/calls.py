"""Functions sent to a rank, and what they returned: the rank's side of :mod:`samestep.launch.functions.pool`.

Functions travel by cloudpickle: those of a notebook or a script by value, all others by name. Nothing but the caller's
own process can write to the socket.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import linecache
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from operator import methodcaller
from pathlib import Path
from types import CodeType
from typing import Any, cast

from samestep.errors import UsageError
from samestep.launch.rank.failure import describe
from samestep.launch.rank.store import serve_store
from samestep.rankenv import child_environment, set_variables

_NO_FILE = "<dynamic-code>"  # what cloudpickle 3.1.3 makes of the file of every code it sends; tracebacks need the file


@dataclass(frozen=True)
class LaunchRequest:
    """One call. `module` is the name and file of the module that defines the function, where it has one.

    A listening socket for the store follows where it `brings_listener`.
    """

    variables: dict[str, str | None]
    path: list[str]
    module: tuple[str, str] | None
    payload: bytes
    brings_listener: bool


def dump_call(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickles a call, or raises UsageError where `fn` or an argument cannot be."""
    try:
        return dump((importable(fn), tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", fn)
        raise UsageError(f"{name} cannot be sent to other processes: {error}") from error


def importable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` under the name that other processes import, where this one runs its module by `python -m`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if getattr(fn, "__module__", None) != "__main__" or spec is None or "." in fn.__qualname__:
        return fn
    return cast("Callable[..., Any]", getattr(importlib.import_module(spec.name), fn.__name__, fn))


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


def serve_calls(connection: Connection, rank: int, size: int) -> None:
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request.brings_listener:
            serve_store(socket.socket(fileno=recv_handle(connection)), size)
        connection.send_bytes(_answer(request, rank))


def _answer(request: LaunchRequest, rank: int) -> bytes:
    before = child_environment({})
    try:
        set_variables(request.variables)
        sys.path[:] = request.path
        _import_module(request.module)
        fn, args = pickle.loads(request.payload)  # noqa: S301  (from our own parent, over a private socket)
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


# --- code in no file, such as a notebook's cells --------------------------------------------------


class Sourced:
    """A function, and lines of code by the name of the file that is not there.

    Without these lines its traceback in another process would have none, inspect and torch.jit no source.
    """

    def __init__(self, fn: Callable[..., Any], lines: dict[str, list[str]]) -> None:
        self._fn, self._lines = fn, lines
        self.__qualname__ = str(getattr(fn, "__qualname__", fn))  # for messages

    def __call__(self, *args: Any) -> Any:
        for name, lines in self._lines.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # None: looked for on no disk
        return self._fn(*args)


def with_source(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` together with the cells that it may come from; `fn` itself where there are none."""
    lines = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and not Path(name).exists()}
    return Sourced(importable(fn), lines) if lines else fn


def with_cell_names(text: str) -> str:
    """Returns a message in which cells bear the names that their notebook gives them."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    for name in [name for name in linecache.cache if name in text]:
        label = named(name)
        if label is not None:
            cell = f"{' '.join(label)}, line "
            text = text.replace(f'File "{name}", line ', cell).replace(f"{name}:", cell)
    return text
