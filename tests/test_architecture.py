"""The tree is the architecture: imports go down or sideways, never in a circle, and files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "samestep"
FLOORS = [  # bottom first; a module may import its own floor or any floor below
    {
        "errors",
        "events",
        "machine",
        "parsing",
        "paths",
        "rankenv",
        "topology",
        "seeding",
        "progress",
        "files",
        "schema",
        "text",
        "_version",
    },
    {"launch", "instrument", "network", "fake_gpus"},
    {"collectives", "compress", "schedule"},
    {"runtime"},
    {"data", "replicas", "pipelines"},
    {"checkpoints", "evaluation"},
    {"verification", "planning", "doctor", "bench", "reporting"},
    {"cli", "recipes", "testing", "__init__", "__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_TORCH = FLOORS[0] | (FLOORS[1] - {"fake_gpus"}) | {"cli", "__init__", "__main__"}
MAX_LINES = 800
FILES = sorted(ROOT.rglob("*.py"))


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module(path) for path in FILES}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns the module of a file and all within it."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path, *, lazy: bool) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of what a file imports; `lazy` includes what functions import."""
    module, *_ = nodes = nodes_of(path)
    for node in nodes if lazy else module.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, module of ours), lazy ones included."""
    for line, name in imports(path, lazy=True):
        head, _, rest = name.partition(".")
        if head != "samestep" or not rest:
            continue
        parts = rest.split(".")
        known = [".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in MODULES]
        yield line, known[0] if known else parts[0]


# `samestep/__init__` re-exports from every floor, so it stands on top and nothing below may import from it
def test_imports_go_down_or_sideways() -> None:
    for path in FILES:
        here = FLOOR_OF[module(path).split(".")[0]]
        for line, target in own_imports(path):
            there = FLOOR_OF.get(target.split(".")[0])
            if target == "__version__":
                continue
            assert there is not None, f"{path}:{line}: {target} stands on no floor; give it one in FLOORS"
            assert there <= here, f"{path}:{line}: floor {here} must not import {target} (floor {there})"


def test_no_module_imports_itself_through_others() -> None:
    graph = {module(path): {target for _, target in own_imports(path)} - {module(path)} for path in FILES}
    graph.pop("__init__")
    # a package's __init__ that re-exports its own files is not a circle unless they import it back
    list(TopologicalSorter(graph).static_order())


def test_files_stay_small() -> None:
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}, "split it along a noun"


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports them by it, and cannot collect the second; it is seen in whole runs only."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []


def test_the_launchers_floors_do_not_import_torch() -> None:
    """Of `network` only links is imported by others than planning and collectives; the rest computes with numpy."""
    for path in FILES:
        top, *rest = module(path).split(".")
        if top in WITHOUT_TORCH:
            refused = {"torch"} if top == "network" and rest != ["links"] else {"torch", "numpy"}
            for line, name in imports(path, lazy=False):
                assert name.split(".")[0] not in refused, f"{path}:{line} imports {name} at module level"


def test_only_rankenv_touches_the_environment() -> None:
    for path in FILES:
        for node in nodes_of(path):
            touched = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}
            assert not touched or path.name == "rankenv.py", f"{path}:{node.lineno}: rankenv owns os.environ"


def test_importing_has_no_effects_and_loads_no_torch() -> None:
    code = "import samestep, sys; print(sorted(m for m in sys.modules if m in {'torch', 'numpy', 'rich'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
