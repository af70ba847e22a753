"""docs/fake-gpus.md shows the table of what is faked."""

from __future__ import annotations

from pathlib import Path

from samestep.fake_gpus.table import NOT_FAKED, TABLE, as_markdown

PAGE = (Path(__file__).parent.parent.parent / "docs" / "fake-gpus.md").read_text(encoding="utf-8")


def test_the_page_shows_the_table() -> None:
    assert as_markdown(TABLE, strict=True) in PAGE
    assert as_markdown(NOT_FAKED, strict=False) in PAGE
