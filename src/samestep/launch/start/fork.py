"""Ranks forked from a process that has imported torch already: 10 ms each, where fresh interpreters take 1.5 s.

What a fork would share by mistake is renewed in the child before the script sees it. String hashes stay the same in all
ranks, so a set of strings has one order, which `samestep verify` must not have: it uses fresh interpreters.
"""

from __future__ import annotations

import ast
import gc
import importlib
import io
import os
import runpy
import signal
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from samestep.launch.process import ForkedProcess, die_with_parent, restore_file_limit
from samestep.launch.rank.bootstrap import RankTask, run_rank
from samestep.launch.rank.script import find_module
from samestep.launch.rank.user_code import is_user_file
from samestep.rankenv import child_environment, set_variables, variable

# Read when torch or its OpenMP library is imported: a script that sets one must come before that import.
EARLY = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "TORCH", "PYTORCH_", "LD_", "PYTHON", "TORCHDYNAMO_")

_own_path: list[str] = []  # the launcher's own place on sys.path; taken off once
_parent_streams: list[io.TextIOWrapper] = []  # the launcher's own streams: collected, they would close the rank's


def read_source(program: str, *, is_module: bool) -> str:
    """Returns the text of a script or module; "" where there is none to read, or where reading would use it up."""
    try:
        file = _module_file(program) if is_module else Path(program)
        file = file / "__main__.py" if file.is_dir() else file
        return file.read_text(encoding="utf-8") if file.is_file() else ""
    except (OSError, UnicodeDecodeError, ImportError, ValueError, zipfile.BadZipFile):
        return ""


def _module_file(name: str) -> Path:
    """Returns the file of a module, of a package its folder; imports neither, for that is the ranks' to do."""
    spec = find_module(name)
    origin = "" if spec is None else spec.origin or ""
    return Path(origin).parent if Path(origin).name == "__init__.py" else Path(origin)


def fork_blocker(source: str) -> str | None:
    r"""Returns why a script cannot be run after torch was imported, or None.

    >>> fork_blocker("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch")
    'it sets OMP_NUM_THREADS in line 2'
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return None  # the ranks will say it
    aliases = {"environ", *(alias for node in nodes for alias in _environ_names(node))}
    for node in nodes:
        for name in _variables_set_by(node, aliases):
            if name is None or name.startswith(EARLY):
                what = f"sets {name}" if name else "sets variables whose names are not written there"
                return f"it {what} in line {getattr(node, 'lineno', '?')}"
    return None


def _environ_names(node: ast.AST) -> list[str]:
    """Returns other names for os.environ: `from os import environ as env`, `env = os.environ`."""
    if isinstance(node, ast.ImportFrom):
        return [alias.asname for alias in node.names if alias.name == "environ" and alias.asname]
    if isinstance(node, ast.Assign) and _is_environ(node.value, set()):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _variables_set_by(node: ast.AST, aliases: set[str]) -> list[str | None]:
    """Returns the environment variables that a piece of code sets or removes; None stands for one without a name.

    os.environ[…] = …, del os.environ[…], os.environ |= …, .setdefault(…), .update(…), .pop(…), os.putenv(…) and so on.
    """
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environ(node.value, aliases):
        return [_text(node.slice)]
    if isinstance(node, ast.AugAssign) and _is_environ(node.target, aliases):
        return _names_in(node.value)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    call = node.func.attr
    if call in {"putenv", "unsetenv"} or (call in {"setdefault", "pop"} and _is_environ(node.func.value, aliases)):
        return [_text(argument) for argument in node.args[:1]]
    if call == "update" and _is_environ(node.func.value, aliases):
        named = [name for argument in node.args for name in _names_in(argument)]
        return named + [keyword.arg for keyword in node.keywords]  # of **more it is None
    return [None] if call in {"clear", "popitem"} and _is_environ(node.func.value, aliases) else []


def _names_in(node: ast.AST) -> list[str | None]:
    if isinstance(node, ast.Dict):
        return [None if key is None else _text(key) for key in node.keys]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return [keyword.arg for keyword in node.keywords]
    return [None]


def _is_environ(node: ast.AST, aliases: set[str]) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id in aliases
    )


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def import_torch(threads: int) -> None:
    """Imports torch before it is known what for, if it can be imported, as for ranks of so many threads."""
    _drop_own_path()
    set_variables({"OMP_NUM_THREADS": variable("OMP_NUM_THREADS") or str(threads)})
    with suppress(Exception):  # whatever a broken installation raises, the ranks will tell it better
        importlib.import_module("torch.utils.data")


def preimport(source: str, folder: Path) -> str | None:
    """Imports what the script will, once for all ranks; returns why its ranks cannot be forked, or None.

    Torch's compiler, 0.8 s, is left out where no optimizer is in sight; `folder` is where the script's modules lie.
    """
    _drop_own_path()
    try:  # no tensor is touched: a child of a process that has used OpenMP hangs in its first parallel loop
        importlib.import_module("torch.utils.data")
        if not source or "optim" in source or "samestep" in source:
            importlib.import_module("torch._dynamo")
        if "samestep" in source:
            _import_samestep()
    except Exception as error:  # noqa: BLE001  (whatever a broken installation raises, the ranks will tell it better)
        return f"torch cannot be imported here ({type(error).__name__}: {error})"
    hidden = _hidden({name for name in sys.modules if "." not in name} - {"__main__"}, folder)
    if hidden:
        return f"{hidden} lies beside it and would be taken for the installed package of that name"
    if threading.active_count() > 1:
        return "importing torch has started threads"
    is_user_file(str(folder))  # where packages lie is looked up once, not by every rank at its first collective
    gc.collect()
    gc.freeze()  # else the ranks' first collections would copy every page
    return None


def _drop_own_path() -> None:
    """Takes the place of the launcher's own program off sys.path: of `python -m` it is the current directory."""
    if not sys.flags.safe_path and not _own_path:
        _own_path.append(sys.path.pop(0))


def _import_samestep() -> None:
    """Imports what defines the public names; each is looked up again, for what watches a rank changes it."""
    package = importlib.import_module("samestep")
    for name in set(package.__all__) - set(vars(package)):
        getattr(package, name)
        delattr(package, name)


def _hidden(names: set[str], folder: Path) -> str | None:
    """Returns a file of the script's own that a package imported before it would hide."""
    files = (folder / f"{name}.py" for name in sorted(names))
    packages = (folder / name / "__init__.py" for name in sorted(names))
    for path in (*files, *packages):
        name = path.stem if path.stem != "__init__" else path.parent.name
        if path.exists() and getattr(sys.modules[name], "__file__", None) != str(path):
            return str(path)
    return None


def fork(
    task: RankTask,
    environment: Mapping[str, str],
    *,
    stdin: int | None,
    stdout: int,
    stderr: int,
    keep: Sequence[int] = (),
) -> ForkedProcess:
    """Starts a rank as a copy of this process, in a session of its own; without `stdin` it has nothing to read."""
    kept = [*task.descriptors(), *keep]
    return _forked(partial(_run_rank_process, task), environment, (stdin, stdout, stderr), kept)


def fork_command(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess:
    """Starts `samestep ARGUMENTS` as a copy of this process, in a session of its own, with nothing to read."""
    return _forked(partial(_command, list(arguments)), environment, (None, output, output), [])


def _forked(
    work: Callable[[], NoReturn],
    environment: Mapping[str, str],
    streams: tuple[int | None, int, int],
    keep: Sequence[int],
) -> ForkedProcess:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # python has none where the descriptor was closed
        stream.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    try:
        os.setsid()
        die_with_parent(parent)
        _reset_signals()
        _take_streams(streams)
        _close_all_but(keep)
        restore_file_limit()
        set_variables({**dict.fromkeys(child_environment({})), **environment})
        _renew_streams(unbuffered=bool(environment.get("PYTHONUNBUFFERED")))
        work()
    finally:
        os._exit(70)  # EX_SOFTWARE: only reached where the lines above failed


def _run_rank_process(task: RankTask) -> NoReturn:
    _renew_libraries()
    run_rank(task)


def _command(arguments: list[str]) -> NoReturn:
    sys.argv = ["samestep", *arguments]
    code = 70
    try:
        runpy.run_module("samestep", run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001  (the interpreter ends here, and tells it as it always would)
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_streams(streams: tuple[int | None, int, int]) -> None:
    for number, descriptor in enumerate(streams):
        taken = os.open(os.devnull, os.O_RDONLY) if descriptor is None else descriptor
        os.dup2(taken, number, inheritable=True)


def _close_all_but(kept: Sequence[int]) -> None:
    edges = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for low, high in pairwise(edges):
        os.closerange(low + 1, high)


def _renew_streams(*, unbuffered: bool) -> None:
    _parent_streams.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))  # type: ignore[arg-type]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, unbuffered=unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, unbuffered=unbuffered, errors="backslashreplace")  # type: ignore[misc]


def _writer(descriptor: int, *, unbuffered: bool, errors: str | None = None) -> io.TextIOWrapper:
    binary = open(descriptor, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        binary,
        encoding=getattr(_parent_streams[1], "encoding", None),
        errors=errors or getattr(_parent_streams[1], "errors", None),
        line_buffering=not unbuffered and (descriptor == 2 or os.isatty(descriptor)),
        write_through=unbuffered,
    )


def _renew_libraries() -> None:
    import numpy as np
    import torch

    torch.set_num_threads(torch.get_num_threads())  # first: what the parent had computed does not hold here
    torch.default_generator.seed()
    np.random.seed()  # noqa: NPY002  (the global generator is what would be shared; Python renews its own)
