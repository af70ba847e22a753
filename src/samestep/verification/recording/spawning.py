"""Runs the one rank of a script that starts its ranks by itself, with arguments that say there is one.

The number of ranks is the argument that the script's file passes to `init_process_group(world_size=…)`, by its name: a
number of epochs may be as large. An attribute of an argument, `args.world_size`, is set in a copy of it.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def target_of(process: Any) -> str:
    """Returns the name of what a process of `multiprocessing` runs; the same one in its parent and in itself."""
    target = getattr(process, "_target", None) or type(process)  # the main process has none
    module = getattr(target, "__module__", "")
    return f"{'__main__' if module == '__mp_main__' else module}.{getattr(target, '__qualname__', target)}"


def run_as_one_rank(process: Any, size: int) -> None:
    """Runs in this process what a process of `multiprocessing` would, as the only one of `size` ranks."""
    if process._target is not None:  # noqa: SLF001
        process._args = for_one_rank(process._target, process._args, size)  # noqa: SLF001
    process.run()


def for_one_rank(function: Any, arguments: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Returns the positional arguments of a function that each of `size` ranks runs, for a world of one."""
    try:
        names = list(inspect.signature(function).parameters)
        source = Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8")
        sizes = set(_sizes(ast.parse(source)))
    except (TypeError, ValueError, OSError, SyntaxError):
        return arguments
    found = list(arguments)
    for place, (name, value) in enumerate(zip(names, arguments, strict=False)):
        for base, attribute in sizes:
            if base != name:
                continue
            if attribute is None and value == size and isinstance(value, int):
                found[place] = 1
            elif attribute is not None and getattr(value, attribute, None) == size:
                found[place] = copy.copy(value)
                with suppress(AttributeError):  # it is frozen
                    setattr(found[place], attribute, 1)
    return tuple(found)


def _sizes(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Name, and the name of its attribute, of each number of ranks that the file passes to `init_process_group`."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if called != "init_process_group":
            continue
        for keyword in call.keywords:
            value = keyword.value
            if keyword.arg != "world_size":
                continue
            if isinstance(value, ast.Name):
                yield value.id, None
            elif isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
                yield value.value.id, value.attr
