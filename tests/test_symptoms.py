"""The page of symptoms says what is there: messages, codes, commands, options, names and keywords."""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch

import samestep
from help_texts import options_of
from samestep import errors
from samestep.cli import COMMANDS
from samestep.data.shards import Shards
from samestep.pipelines.layers import Device
from samestep.verification.pages import PAGES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "symptoms.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("| you see |", "|---|"))
]
SOURCE = re.sub(
    r'"\s*\n\s*f?r?"',
    "",
    "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src" / "samestep").rglob("*.py"))),
)
OTHERS = {  # the kernel's, gloo's, torch's
    "Address already in use",
    "Connection closed by peer",
    "The hostname of the client socket cannot be retrieved",
    "Received data size doesn't match",
    "RANK expected, but not set",
    "Distributed package doesn't have NCCL built in",
    "terminate called without an active exception",
    "module.",
}
DOCKERS = {"--shm-size", "--ipc"}
NAMED = {"optimizer", "schedule", "data"}  # what samestep.checkpoint takes under any name


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def seen():
    """The messages that a user is said to see, without the numbers and names in them."""
    for row in ROWS:
        for words in quoted(row[0]):
            if re.search(r"[a-z] [a-z]", words) and "(" not in words and words not in OTHERS:
                yield words


def test_there_are_rows():
    assert len(ROWS) > 50
    assert len(list(seen())) >= 5


@pytest.mark.parametrize("words", [*seen(), "rank R is slow", "rank R has more to do", "not finish a step"])
def test_a_message_is_one_that_samestep_writes(words):
    words = re.sub(r"^(\w+Error): ", "", words)
    for piece in re.split(r"\b[NMR]\b|\b17\b|…|\brank\b", words):
        assert piece.strip() in SOURCE, piece


def test_every_code_is_one_of_verifys():
    codes = {word for row in ROWS for cell in row for word in quoted(cell) if re.fullmatch(r"[a-z]+(-[a-z]+)+", word)}
    assert len(codes) > 15
    assert codes - set(PAGES) == set()


def test_every_error_is_one_of_samesteps():
    named = {word for row in ROWS for cell in row for word in re.findall(r"\b[A-Z]\w+Error\b", cell)}
    assert len(named) > 3
    assert named - set(errors.__all__) == set()


def test_commands_and_options_are_there():
    commands = {tuple(words.split()) for words in quoted(PAGE) if words.startswith("samestep ")}
    known = {name: options_of(name) for name in sorted({words[1] for words in commands})}
    assert set(known) <= set(COMMANDS)
    asked = {(words[1], word) for words in commands for word in words if word.startswith("--")}
    assert {(name, option) for name, option in asked if option not in known[name]} == set()
    alone = {option for words in quoted(PAGE) for option in re.findall(r"(?<!\S)--[a-z-]+", words)}
    assert alone - DOCKERS - set().union(*known.values()) == set()


def test_every_keyword_is_one_of_a_public_function():
    public = [getattr(samestep, name) for name in samestep.__all__]
    functions = [each for each in public if inspect.isfunction(each) or is_dataclass(each)]
    functions += [Shards.mean, Device, torch.load]
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    given = {word for words in quoted(PAGE) for word in re.findall(r"(?<!-)\b([a-z_]+)=", words)}
    assert len(given) > 12
    assert given - taken - NAMED == set()


def test_every_name_of_samestep_is_public():
    named = {word for words in quoted(PAGE) for word in re.findall(r"\bsamestep\.(\w+)", words)}
    assert named - set(samestep.__all__) == set()
