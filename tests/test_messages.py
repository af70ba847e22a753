"""The page of messages has every sentence that an error of samestep can begin with, in its part."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import errors
from samestep.verification.pages import KINDS

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "samestep"
PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8").replace("\\", "")


@pytest.fixture(scope="module")
def script():
    found = importlib.util.spec_from_file_location("messages", ROOT / "scripts" / "messages.py")
    module = importlib.util.module_from_spec(found)
    sys.modules["messages"] = module
    sys.path.insert(0, str(ROOT / "scripts"))  # as python does for a script
    found.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "scripts"))
    del sys.modules["messages"]


@pytest.fixture(scope="module")
def raised():
    """Where an error is raised with a sentence that stands right there, and the sentence's fixed parts."""
    return list(sentences_raised())


def sentences_raised():
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args):
                continue
            told = call.args[0]
            if call.func.id not in errors.__all__ or not isinstance(told, ast.Constant | ast.JoinedStr):
                continue
            parts = told.values if isinstance(told, ast.JoinedStr) else [told]
            fixed = [" ".join(part.value.split()) for part in parts if isinstance(part, ast.Constant)]
            if sum(len(re.findall(r"[a-z]{2,}", part)) for part in fixed) > 2:
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", fixed


def test_the_page_is_what_the_script_writes():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "messages.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_sentence_that_is_raised_is_there(raised):
    sentences = dict(raised)
    assert len(sentences) > 300
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    missing = [
        where for where, parts in sentences.items() if not any(all(part in row for part in parts) for row in rows)
    ]
    assert missing == []


def test_a_new_sentence_comes_with_its_class_and_what_a_run_fills_in(script, tmp_path):
    (tmp_path / "new.py").write_text(
        "def check(n):\n"
        "    if n < 1:\n"
        "        raise UsageError(f'{n} is none: give one or more')\n"
        "    raise DataError(why(n))\n\n"
        "def why(n):\n"
        "    return 'the sample is empty' if n else f'there are {n!r} samples too many'\n",
        encoding="utf-8",
    )
    assert set(script.messages(tmp_path / "new.py")) == {
        ("UsageError", "… is none: give one or more"),
        ("DataError", "the sample is empty"),
        ("DataError", "there are … samples too many"),
    }


def test_every_module_that_raises_belongs_to_one_part(script, raised):
    for where, _ in raised:
        module = where.partition(":")[0]
        assert any(module.startswith(prefix) for area in script.AREAS for prefix in area.where), module


def test_every_error_says_how_it_comes_about_and_what_fixes_it():
    assert set(KINDS) == set(errors.__all__)
