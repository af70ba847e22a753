"""Code that lies in no file, such as a notebook's cells: its lines in the tracebacks of other processes.

    kernel    linecache: "/tmp/ipykernel_9/123.py" -> the lines of In[3]
    rank      has the function, but no such file: its traceback would have no lines, inspect and torch.jit no source

So the lines travel with the call, and the caller names the cell as its notebook does: `Cell In[3], line 2`.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.launch.calls import importable

__all__: list[str] = []


class Sourced:
    """A function, and lines of code by the name of the file that is not there."""

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
