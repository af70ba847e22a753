"""Tables of words, which a narrow window cannot show side by side: there a row stands as a card, each cell named.

wide      you see      it is      what fixes          narrow      **you see**
          a            b          c                               it is        b
                                                                  what fixes   c

Each cell learns the head of its column (`data-label`); `_static/site.css` does the rest. Tables of numbers stay as they
are, since they are read along their columns, and scroll by themselves.
"""

from __future__ import annotations

import html
import re
from typing import Any

from sphinx.application import Sphinx

WIDE = 80  # letters of the longest cells of all columns: what does not fit beside each other
TABLE = re.compile(r"<table class=\"(?P<classes>docutils[^\"]*)\">(?P<inside>.*?)</table>", re.DOTALL)
ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(?P<tag>t[hd])(?P<told>[^>]*)>(?P<inside>.*?)</(?P=tag)>", re.DOTALL)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    app.connect("html-page-context", _name_cells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _name_cells(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    if context.get("body"):
        context["body"] = TABLE.sub(_told, context["body"])


def _told(table: re.Match[str]) -> str:
    head, *rows = ([_words(cell["inside"]) for cell in CELL.finditer(row)] for row in ROW.findall(table["inside"]))
    longest = sum(max(map(len, column)) for column in zip(head, *rows, strict=False))
    if "<thead>" not in table["inside"] or len(head) < 3 or longest < WIDE:
        return table[0]
    inside = ROW.sub(lambda row: _named(row[0], head), table["inside"])
    return f'<table class="{table["classes"]} cards">{inside}</table>'


def _named(row: str, head: list[str]) -> str:
    names = iter(head)
    return CELL.sub(lambda cell: _labelled(cell, next(names)) if cell["tag"] == "td" else cell[0], row)


def _labelled(cell: re.Match[str], name: str) -> str:
    if not _words(cell["inside"]):
        return cell[0]  # a card leaves it out
    return f'<td{cell["told"]} data-label="{html.escape(name)}">{cell["inside"]}</td>'


def _words(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()
