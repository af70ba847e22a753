"""The documents are true: the README's code runs, links lead somewhere, the map of the house is complete."""

from __future__ import annotations

import ast
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
SOURCES = sorted((ROOT / "src" / "samestep").rglob("*.py"))


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


def test_the_map_of_the_house_names_every_module():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE))
    real = {str(path.relative_to(ROOT / "src" / "samestep")) for path in SOURCES if path.name != "__init__.py"}
    assert real - named == set(), "missing on the map"
    assert named - real == set(), "on the map, but gone"


def test_the_map_of_the_house_says_of_each_module_what_it_says_of_itself_on_its_own_floor():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    floors = re.split(r"^## Floor \d", text, flags=re.MULTILINE)[1:]
    told = {
        name: (floor, why)
        for floor, rows in enumerate(floors)
        for name, why in re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", rows, re.MULTILINE)
    }
    first = {name: (ast.get_docstring(_tree(name)) or "").split("\n")[0] for name in told}
    assert {name: why for name, (_, why) in told.items()} == first
    assert {name: floor for name, (floor, _) in told.items()} == {
        name: FLOOR_OF[name.partition("/")[0].removesuffix(".py")] for name in told
    }


def _tree(name: str) -> ast.Module:
    return ast.parse((ROOT / "src" / "samestep" / name).read_text(encoding="utf-8"))
