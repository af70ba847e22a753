"""A page of docs/ that a script writes: brought up to date, or looked at whether it is (--check)."""

from __future__ import annotations

import sys
from pathlib import Path


def written(page: Path, text: str, script: str) -> int:
    """Returns 0 where the page is what it should be, or is by now.

    Args:
        page: the file.
        text: that belongs there.
        script: whose name is told.
    """
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{page.name} is not what {script} writes; `make readme` brings it up to date")
        return 1
    page.write_text(text, encoding="utf-8")
    return 0
