"""A file or a module run as `__main__`, with the argv, path and names that python itself would give it.

`runpy` takes `__main__` away as soon as the code has ended; atexit handlers and threads still look things up there.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep.errors import UsageError
from samestep.rankenv import variable

# What python itself has imported before the first line of a script: a file of that name is never found.
EARLIEST = {
    *("_collections_abc", "_sitebuiltins", "abc", "codecs", "encodings", "genericpath", "importlib", "io", "os"),
    *("posixpath", "runpy", "site", "stat", "zipimport"),
}


def run_script(path: str, arguments: list[str]) -> None:
    """Runs a file, or a directory or archive that holds `__main__.py`, as `python path arguments` does."""
    sys.argv[:] = [path, *arguments]
    _check_readable(path)
    file = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118  (as python 3.9 made it: absolute, else as given)
    if path.endswith(".pyc"):
        runpy.run_path(path, run_name="__main__")
    elif Path(path).is_dir() or path.endswith((".zip", ".pyz")):
        _look_first_in(file)
        _new_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001  (python's own way)
    else:
        _look_first_in(str(Path(path).resolve().parent))
        loader = SourceFileLoader("__main__", file)
        main = _new_main()
        main.update(__file__=file, __loader__=loader, __cached__=None, __annotations__={})
        code = compile(loader.get_data(file), file, "exec", dont_inherit=True)
        exec(code, main)  # noqa: S102  (running the user's script is the purpose)


def _new_main() -> dict[str, Any]:
    sys.modules["__main__"] = ModuleType("__main__")
    names = vars(sys.modules["__main__"])
    names.update(__builtins__=builtins)
    return names


def _check_readable(path: str) -> None:
    """Refuses a pipe or a terminal as the script of several ranks: the first that read it would leave nothing."""
    place = Path(path)
    if place.exists() and not place.is_file() and not place.is_dir() and int(variable("WORLD_SIZE") or 1) > 1:
        raise UsageError(f"{path} can be read by one process only, and each rank reads its script: save it as a file")


def _look_first_in(folder: str) -> None:
    """Puts a folder before all others, as if nothing had been imported yet but what python needs itself.

    Modules of python's that the launcher has imported, and that the folder has files named after, are forgotten:
    started by python alone, the script would find its own. Whoever has imported python's already keeps it.
    """
    hidden = set(sys.modules) & set(sys.stdlib_module_names) - EARLIEST - set(sys.builtin_module_names)
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in hidden & set(_modules_in(folder))}
    names = {name for name, file in files.items() if not file.startswith(f"{folder}/")}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.path.insert(0, folder)


def _modules_in(folder: str) -> Iterable[str]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # an archive, say
        return ()
    files = (entry.name.partition(".")[0] for entry in entries if entry.name.endswith((".py", ".so")))
    packages = (entry.name for entry in entries if Path(entry.path, "__init__.py").is_file())
    return (*files, *packages)


def run_module(name: str, arguments: list[str]) -> None:
    sys.argv[:] = [name, *arguments]
    _look_first_in(str(Path.cwd()))
    _new_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # noqa: SLF001  (python's own way)


def find_module(name: str) -> ModuleSpec | None:
    """Finds a module as `python -m` does, in the current directory first, and imports none of the packages above it.

    `importlib.util.find_spec` imports them, which is for the ranks to do.
    """
    first, *rest = name.split(".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = find_spec(first) if first else None
    finally:
        sys.path.pop(0)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        first = f"{first}.{part}"
        spec = PathFinder.find_spec(first, spec.submodule_search_locations)
    return spec
