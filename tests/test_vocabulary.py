"""Identifiers use the field's terms: no word of the list in vocabulary.py, where a part has joined."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vocabulary import EXCEPTIONS, JOINED, WORDS

import samestep

ROOT = Path(samestep.__file__).parent


def words(identifier: str) -> list[str]:
    """Returns the words of an identifier, in lower case and singular.

    >>> words("_HeadBeats2"), words("take_wishes")
    (['head', 'beat'], ['take', 'wish'])
    """
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    return [_singular(part.lower()) for part in parts]


def _singular(word: str) -> str:
    for plural, singular in (("shelves", "shelf"), ("ies", "y"), ("shes", "sh"), ("s", "")):
        if word.endswith(plural) and not word.endswith("ss"):
            return word.removesuffix(plural) + singular
    return word


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and name of everything that a module defines: classes, functions, arguments, variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def private_words(path: Path) -> list[str]:
    """Returns `file:line: identifier: use …` for every identifier, and the file's name, with a word of the list."""
    name = path.relative_to(ROOT).as_posix()
    found = [(1, path.stem), *identifiers(ast.parse(path.read_text(encoding="utf-8")))]
    return [
        f"{name}:{line}: {identifier}: use {WORDS[word]}"
        for line, identifier in dict.fromkeys(found)
        for word in words(identifier)
        if word in WORDS and (name, identifier) not in EXCEPTIONS
    ]


@pytest.mark.parametrize("part", JOINED)
def test_a_part_that_has_joined_uses_no_word_of_the_list(part):
    place = ROOT / part
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    assert files
    assert [line for path in files for line in private_words(path)] == []


def test_every_kind_of_definition_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "letters.py").write_text(
        "import os as shelves\n"
        "def take_wishes(vigil, *told, Herd=1):\n"
        "    self.mended = mother = 1\n"
        "class HeadBeat: pass\n"
        "for pulse, (standing, fine) in []: pass\n"
    )
    found = [line.split(": ")[1] for line in private_words(tmp_path / "letters.py")]
    assert sorted(found) == sorted(
        [
            "letters",
            "shelves",
            "take_wishes",
            "vigil",
            "told",
            "Herd",
            "mended",
            "mother",
            "HeadBeat",
            "pulse",
            "standing",
        ]
    )


def test_exceptions_are_needed_and_say_why():
    for (name, identifier), reason in EXCEPTIONS.items():
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        assert identifier in {found for _, found in identifiers(tree)}, f"{name} has no {identifier} any more"
        assert reason
