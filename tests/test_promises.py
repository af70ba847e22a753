"""Every promise to users has a test in `make test` that exercises its effect; `promises.py` says which."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import samestep
from promises import MISSION, PROMISES
from samestep import errors
from samestep.cli import COMMANDS
from samestep.verification.pages import PAGES
from test_surface import SIGNATURES

ROOT = Path(__file__).parent.parent
EXIT_CODES = {  # the table at the end of docs/codes.md
    "run": (0, 1, 2, 75, 124, "128 + N", 130, "the script's own"),
    "verify": (0, 1, 2, 3, 130),
    "doctor": (0, 1, 2, 130),
    "checkpoint": (0, 1, 2, 130),
    "plan": (0, 1, 2, 130),
    "report": (0, 2, 130),
    "watch": (0, 2),  # not 130: Ctrl-C is how a person leaves it, and it returns 0
    "bench": (0, 2, 130),
}


def options_of(command):
    """Returns what the help of a command lists: options by their longest spelling, and the actions of `checkpoint`."""
    actions = import_module(f"samestep.cli.{command}")._parser()._actions
    shown = [action for action in actions if action.help != argparse.SUPPRESS and action.option_strings]
    options = {max(action.option_strings, key=len) for action in shown} - {"--help"}
    return options | ({"list", "show", "verify", "convert"} if command == "checkpoint" else set())


def promises():
    """Returns promise -> the words of which each must stand in one of its tests, or in what that test uses."""
    words = {f"mission: {row}": () for row in MISSION}
    words |= {
        f"samestep {name} {option}": (option,) for name in sorted(COMMANDS) for option in sorted(options_of(name))
    }
    words |= {f"samestep {name}: exit code {code}": () for name, codes in EXIT_CODES.items() for code in codes}
    words |= {f"finding {code}": (code,) for code in PAGES}
    words |= {f"error {name}": (name,) for name in errors.__all__}
    for name in SIGNATURES:
        for argument, parameter in inspect.signature(getattr(samestep, name)).parameters.items():
            by_name = parameter.kind is parameter.KEYWORD_ONLY  # a caller need not write the name of another one
            words[f"samestep.{name}({argument})"] = (name, argument) if by_name else (name,)
    return words


@pytest.fixture(scope="module")
def run_by_make_test(request):
    """Returns the tests that `make test` runs: those of this run, or as pytest collects their files."""
    named = {test for tests in PROMISES.values() for test in tests}
    items = [item for item in request.session.items if item.get_closest_marker("prove") is None]
    here = {item.nodeid.partition("[")[0] for item in items}
    if named <= here:
        return here
    files = sorted(file for file in {test.partition("::")[0] for test in named} if (ROOT / file).is_file())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "not prove", *files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


@cache
def defined_in(file):
    """Returns the names that a file of tests defines or imports from another one -> the text of each."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        begin = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])
        lines = "\n".join(text.splitlines()[begin - 1 : node.end_lineno])
        if isinstance(node, ast.ImportFrom) and (helpers := helper_file(file, node.module)):
            lines = (ROOT / helpers).read_text(encoding="utf-8")
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        else:
            names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
        for name in names:
            found[name] = found.get(name, "") + lines
    return found


def helper_file(file, module):
    """Returns the file of tests that is imported, or None where it is none of them."""
    places = [Path(file).parent / f"{module}.py", Path("tests") / f"{module}.py"]
    return next((str(place) for place in places if (ROOT / place).is_file()), None)


@cache
def text_of(test):
    """Returns the text of a test and of all that it uses of its own file, of its conftest.py and of helpers."""
    file, _, name = test.partition("::")
    known = defined_in(file)
    if (ROOT / file).with_name("conftest.py").is_file():
        known = defined_in(str(Path(file).with_name("conftest.py"))) | known
    texts, left = {}, [name, "pytestmark"]
    while left:
        name = left.pop()
        if name in known and name not in texts:
            texts[name] = known[name]
            left += set(re.findall(r"\w+", known[name]))
    return "\n".join(texts.values())


def test_every_promise_is_in_the_table_and_nothing_else():
    assert sorted(PROMISES) == sorted(promises())


@pytest.mark.parametrize(("promise", "words"), promises().items(), ids=promises())
def test_a_promise_is_tested_by_make_test(run_by_make_test, promise, words):
    assert PROMISES.get(promise), f"no test shows: {promise}"
    for test in PROMISES[promise]:
        assert test in run_by_make_test, f"{test} is not there, or not in `make test`"
    for word in words:
        stands = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")
        assert any(map(stands.search, map(text_of, PROMISES[promise]))), f"{word} stands in no test of: {promise}"
