"""A file or a module run as `__main__`, with the argv, path and names that python itself would give it.

`runpy.run_path` would do for a file, but takes `__main__` away as soon as the code has ended; atexit handlers,
threads and processes that are started late still look things up there.
"""

from __future__ import annotations

import builtins
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

__all__: list[str] = []


def run_script(path: str, arguments: list[str]) -> None:
    """Runs a file, or a directory or archive that holds `__main__.py`, as `python path arguments` does."""
    sys.argv[:] = [path, *arguments]
    if Path(path).is_dir() or path.endswith((".zip", ".pyz", ".pyc")):
        runpy.run_path(path, run_name="__main__")  # puts what it runs on sys.path itself
        return
    sys.path.insert(0, str(Path(path).resolve().parent))
    loader = SourceFileLoader("__main__", path)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102  (running the user's script is the purpose)


def run_module(name: str, arguments: list[str]) -> None:
    """Runs a module as `python -m name arguments` does."""
    sys.argv[:] = [name, *arguments]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(name, run_name="__main__", alter_sys=True)
