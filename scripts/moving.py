"""Brings the diffs in docs/moving.md and docs/zh/moving.md up to date with examples/moving, or checks it (--check)."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("docs/moving.md", "docs/zh/moving.md")
BLOCK = re.compile(r"```diff\n--- examples/moving/(\w+)/before\.py\n.*?```\n", re.DOTALL)


def main() -> int:
    """Returns 0 where the pages show what the files are, or do by now."""
    stale = [name for name in PAGES if brought_up_to_date(text := read(name)) != text]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"{name} shows other files than examples/moving holds: python scripts/moving.py fixes it")
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).write_text(brought_up_to_date(read(name)), encoding="utf-8")
    return 0


def read(name: str) -> str:
    """Returns the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def brought_up_to_date(text: str) -> str:
    """Returns a page with the diffs that belong there."""
    return BLOCK.sub(lambda found: f"```diff\n{difference(found[1])}```\n", text)


def difference(name: str) -> str:
    """Returns the unified diff from one's before.py to its after.py."""
    names = [f"examples/moving/{name}/{side}.py" for side in ("before", "after")]
    before, after = (read(each).splitlines(keepends=True) for each in names)
    return "".join(difflib.unified_diff(before, after, fromfile=names[0], tofile=names[1], n=1))


if __name__ == "__main__":
    sys.exit(main())
