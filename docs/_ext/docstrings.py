"""Docstrings as the house writes them, made ready for Sphinx.

Drawings stand indented behind a paragraph, without the `::` that reStructuredText wants, and their numbers are
explained below as `[1] …`. Here the `::` is put in, and the numbers become a list, before napoleon reads the sections.
Classes that functions make are shown without a constructor's signature.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import getdoc
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

MADE = {"Axis", "Checkpoint", "Pipeline", "PipelinePlan", "Replica", "Report", "Shards", "World", "testing.RankSet"}
FIRST, LAST = 400, 600  # before and after napoleon, whose priority is the default of 500
SECTION = re.compile(r"(Args|Attributes|Example|Examples|Raises|Returns|Yields|Note|Notes):\s*$")
NUMBER = re.compile(r"\[\d\] ")
ITEM = re.compile(r"\s*([-*+]|\d+\.|\w\.)\s")


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    app.connect("autodoc-process-docstring", _process, priority=FIRST)
    app.connect("autodoc-process-docstring", _keep_properties, priority=LAST)
    app.connect("autodoc-process-signature", _unsigned)
    app.connect("doctree-read", _reword)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _process(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = list(marked(lines))


def _keep_properties(app: Sphinx, what: str, _name: str, found: Any, _options: Any, lines: list[str]) -> None:
    """Reads a property as a method: napoleon takes what stands before a colon for its type, and sees no sections."""
    if what == "property":
        lines[:] = GoogleDocstring(list(marked((getdoc(found) or "").splitlines())), app.config, app, "method").lines()


def _unsigned(
    _app: Sphinx, what: str, name: str, _object: Any, _options: Any, _signature: str | None, _returns: str | None
) -> tuple[str, None] | None:
    return ("", None) if what == "class" and name.removeprefix("samestep.") in MADE else None


def _reword(_app: Sphinx, tree: nodes.document) -> None:
    """Shows a dash where Sphinx writes two hyphens behind a name, and says attributes where it says variables."""
    words = {" -- ": " \N{EN DASH} ", "Variables": "Attributes"}
    for text in list(tree.findall(nodes.Text)):
        if text in words and (text != "Variables" or isinstance(text.parent, nodes.field_name)):
            text.parent.replace(text, nodes.Text(words[text]))


def marked(lines: list[str]) -> Iterator[str]:
    """Yields the lines, with `::` in front of each drawing."""
    paragraph = ""  # the last line that begins at the margin
    drawing = False
    for number, line in enumerate(lines):
        at_margin = bool(line) and not line[0].isspace()
        if NUMBER.match(line):
            yield from ("", f"- {line}")
            paragraph = line
            continue
        if NUMBER.match(paragraph) and line.strip() and not at_margin:
            yield f"  {line.strip()}"
            continue
        behind_gap = number > 0 and not lines[number - 1].strip()
        if at_margin:
            paragraph, drawing = line, False
        elif line.strip() and behind_gap and not drawing and not _explains(paragraph):
            drawing = True
            yield from ("::", "")
        yield line


def _explains(paragraph: str) -> bool:
    """Tells whether what is indented below belongs to a section, an item, a directive or a `::` already there."""
    return (
        bool(SECTION.match(paragraph) or ITEM.match(paragraph))
        or paragraph.startswith("..")
        or paragraph.endswith("::")
    )
