"""Brings the diffs in docs/moving.md up to date with examples/moving, or checks that they are (--check)."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "moving.md"
BLOCK = re.compile(r"```diff\n--- examples/moving/(\w+)/before\.py\n.*?```\n", re.DOTALL)


def main() -> int:
    """Returns 0 where the page shows what the files are, or does by now."""
    text = PAGE.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda found: f"```diff\n{difference(found[1])}```\n", text)
    if new == text:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/moving.md shows other files than examples/moving holds: python scripts/moving.py mends it")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


def difference(name: str) -> str:
    """Returns the unified diff from one's before.py to its after.py."""
    names = [f"examples/moving/{name}/{side}.py" for side in ("before", "after")]
    before, after = ((ROOT / each).read_text(encoding="utf-8").splitlines(keepends=True) for each in names)
    return "".join(difflib.unified_diff(before, after, fromfile=names[0], tofile=names[1], n=1))


if __name__ == "__main__":
    sys.exit(main())
