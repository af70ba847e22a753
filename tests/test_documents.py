"""The documents are true: the README's code runs, links lead somewhere, the architecture page is complete."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from test_architecture import FLOOR_OF

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def sides(diff):
    """The two scripts of a diff: without the lines that it adds, and without those that it takes away."""
    lines = diff.splitlines()
    return ["\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-"]


@pytest.mark.parametrize("side", [0, 1], ids=["before", "after"])
def test_the_readmes_diff_is_of_two_scripts_that_run(side, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 4, generator=draw)
    mine = types.ModuleType("mine")
    mine.Net = lambda: nn.Linear(4, 2)
    mine.training_set = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    monkeypatch.setitem(sys.modules, "mine", mine)
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names = {"__name__": "train"}
    exec(compile(sides(diff)[side], "README.md", "exec"), names)
    assert names["main"]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]*)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert not target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_architecture_page_has_every_module_on_its_layer():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| ([^|]*) \|", text, re.MULTILINE)
    assert {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)`", names)} == FLOOR_OF


def test_the_architecture_page_names_files_that_are_there():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:cli|launch)/[\w/]+\.py", text))
    assert len(named) > 4
    assert [name for name in named if not (ROOT / "src" / "samestep" / name).exists()] == []
