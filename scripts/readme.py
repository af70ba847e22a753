"""Puts what `samestep verify` says of a broken script into the README, or checks that it stands there (--check)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = "zoo/mean-of-token-means/buggy.py"
BEGIN, END = f"```\n$ samestep verify {SCRIPT}\n", "```\n"


def main() -> int:
    """Returns 0 where the README says what the command says, or does by now."""
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    block, _, after = rest.partition(END)
    said = said_now()
    if said == block:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"the README shows\n{block}\nand the command says\n{said}\n`make readme` brings it up to date")
        return 1
    page.write_text(before + BEGIN + said + END + after, encoding="utf-8")
    return 0


def said_now() -> str:
    """Returns the report on the script."""
    command = [sys.executable, "-m", "samestep", "verify", SCRIPT]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main())
