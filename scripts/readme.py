"""Draws the README's picture, or checks it (--check): `samestep verify` on a script with a bug, the fix, verify again.

The script is one of the zoo, under the name train.py. The lines of the picture are what the commands print.
"""

from __future__ import annotations

import html
import io
import re
import subprocess
import sys
import tempfile
import tomllib
from difflib import unified_diff
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parent.parent
BUG = ROOT / "zoo" / "set-epoch-forgotten"
PICTURE = ROOT / "docs" / "_static" / "verify.svg"
BACKGROUND, TEXT = (13, 17, 23), (201, 209, 217)
COLOURS = [(110, 118, 129), (255, 123, 114), (126, 231, 135), (210, 153, 34), (121, 192, 255), *[(255, 255, 255)] * 3]
THEME = TerminalTheme(BACKGROUND, TEXT, COLOURS, COLOURS)
STYLES = (  # how a terminal's line looks, by what it begins with
    (r"\$ .*", "bold white"),
    (r"ERROR.*", "bold red"),
    (r"-.*", "red"),
    (r"\+.*", "green"),
    (r".*: the same training \(.*", "bold green"),
    (r".*: a different training.*", "bold red"),
    (r"      fix: .*", "green"),
    (r"  (not |nothing to )?check(ed)?: .*|    \S.*", "bright_black"),
)
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font: {char_height}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> int:
    """Returns 0 where the picture shows what the commands print, or does by now."""
    picture = drawn(session())
    if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PICTURE.name} does not show what the commands print; `make readme` draws it anew")
        return 1
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


def scripts() -> tuple[str, str]:
    """Returns the script with the bug, and without it."""
    buggy = (BUG / "buggy.py").read_text(encoding="utf-8")
    fixed = buggy
    for fix in tomllib.loads((BUG / "expected.toml").read_text(encoding="utf-8"))["fix"]:
        fixed = fixed.replace(fix["old"], fix["new"].strip("\n"))
    return buggy, fixed


def session() -> str:
    """Returns what a terminal shows of the commands."""
    buggy, fixed = scripts()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(buggy, encoding="utf-8")
        first = verified(folder)
        script.write_text(fixed, encoding="utf-8")
        second = verified(folder)
    difference = unified_diff(buggy.splitlines(), fixed.splitlines(), "", "", n=0, lineterm="")
    changed = "\n".join(line for line in list(difference)[2:] if not line.startswith("@@"))
    command = "$ samestep verify train.py\n"
    return f"{command}{first}\n$ git diff -U0 | grep '^[-+] '\n{changed}\n\n{command}{second}"


def verified(folder: str) -> str:
    """Returns the report on train.py in a folder."""
    command = [sys.executable, "-P", "-m", "samestep", "verify", "train.py"]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False).stdout


def drawn(text: str) -> str:
    """Returns a terminal with the text in it, as SVG."""
    lines = text.rstrip().splitlines()
    console = Console(record=True, width=max(map(len, lines)) + 1, file=io.StringIO(), force_terminal=True)
    for line in lines:
        style = next((style for pattern, style in STYLES if re.fullmatch(pattern, line)), "")
        console.print(Text(line, style=style))
    picture = console.export_svg(title="", theme=THEME, code_format=SVG, unique_id="verify")
    return re.sub(r"<text[^>]*>\s*</text>|[ \t]+(?=\n)", "", picture)


def text_in(picture: str) -> str:
    """Returns what stands in a picture, without white space.

    >>> text_in('<text x="1">a&#160;b</text> <text>c</text>')
    'abc'
    """
    return re.sub(r"\s", "", "".join(map(html.unescape, re.findall(r"<text[^>]*>([^<]*)</text>", picture))))


if __name__ == "__main__":
    sys.exit(main())
