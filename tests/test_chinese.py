"""A Chinese page says what the English one says: as many parts, tables, pictures, the same names and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page.name for page in DOCS.glob("zh/*.md"))
TRANSLATED = {"bytes", "this-style"}  # stand as code, and mean what they say
HOW_TO = re.compile(r":caption: Do\n.*?\n\n(.*?)```", re.DOTALL)


def parts(page):
    """The level of each heading, and the text below it without blocks of code; first what stands before any."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return ["", *re.findall(r"^(#+) ", text, re.MULTILINE)], re.split(r"^#+ .*$", text, flags=re.MULTILINE)


def names(text):
    """What stands as code, but for what is translated in it."""
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", text) if not re.search(r"[<>一-鿿]", name)}


def figures(text):
    """The numbers in the words of a text: 1,500 and 24 November are 1500 and 24; months and large numbers are words."""
    words = re.sub(r"`[^`]+`|\]\([^)]*\)|\d+ 月|\d+ [万亿]|[A-Z]\w*\d", " ", text)
    words = re.sub(r"(?<=\d)[, ](?=\d{3}\b)", "", words)
    return set(re.findall(r"\d+(?:\.\d+)?", words))


def written_out(text):
    """The numbers of a text that the other language may write as words, or as another unit."""
    return {number for number in figures(text) if float(number) < 13 or float(number) >= 10000}


def test_every_how_to_and_the_pages_before_it_are_there():
    (listed,) = HOW_TO.findall((DOCS / "index.md").read_text(encoding="utf-8"))
    wanted = {"start", "concepts", "moving", *listed.split()}
    assert wanted <= {page.removesuffix(".md") for page in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_parts_tables_and_pictures_of_the_english_one(name):
    (levels, english), (their_levels, chinese) = parts(DOCS / name), parts(DOCS / "zh" / name)
    assert their_levels == levels
    for ours, theirs in zip(english, chinese, strict=True):
        for mark in (r"^\|", r"^\d+\. ", r"^- ", r"!\["):
            assert len(re.findall(mark, theirs, re.MULTILINE)) == len(re.findall(mark, ours, re.MULTILINE)), ours[:200]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_names_and_the_figures_of_the_english_one(name):
    (_, english), (_, chinese) = parts(DOCS / name), parts(DOCS / "zh" / name)
    for ours, theirs in zip(english, chinese, strict=True):
        assert names(ours) - names(theirs) - TRANSLATED == set(), theirs[:200]
        assert figures(ours) - written_out(ours) - figures(theirs) == set(), theirs[:200]
        assert figures(theirs) - written_out(theirs) - figures(ours) == set(), ours[:200]


def test_a_page_that_lacks_something_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# One\n\n`x` takes 1,500 ms.\n\n| a |\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("# 一\n\n`y` 需要 1600 ms。\n", encoding="utf-8")
    (_, (_, ours)), (_, (_, theirs)) = parts(tmp_path / "a.md"), parts(tmp_path / "b.md")
    assert names(ours) - names(theirs) == {"x"}
    assert figures(ours) - figures(theirs) == {"1500"}
