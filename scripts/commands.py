"""Writes docs/commands.md: what every command says to `--help`. `--check` only compares."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from generated import written

from samestep.cli import COMMANDS

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
COLUMNS = "96"
BEGIN = """# The command line

<!-- written by scripts/commands.py; `make readme` brings it up to date -->

Options stand before the script; everything after the script is passed to it. `python -m samestep` is the same program.
This page shows what each command prints for `--help`. Exit codes: [codes](codes.md#exit-codes).

| command | what it does |
|---|---|
"""


def main() -> int:
    """Returns 0 where the page is what it should be, or is by now."""
    return written(PAGE, page(), "scripts/commands.py")


def page() -> str:
    """Returns the page."""
    rows = [f"| [`samestep {name}`](#samestep-{name}) | {summary} |\n" for name, summary in COMMANDS.items()]
    with ThreadPoolExecutor(2) as pool:
        parts = [
            f"\n## samestep {name}\n\n```\n{text}\n```\n"
            for name, text in zip(COMMANDS, pool.map(help_of, COMMANDS), strict=True)
        ]
    return "".join([BEGIN, *rows, *parts])


def help_of(name: str) -> str:
    """Returns what a command prints for `--help`."""
    command = [sys.executable, "-m", "samestep", name, "--help"]
    environment = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())
