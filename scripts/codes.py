"""Writes docs/codes.md: every finding of `samestep verify`, every error, every exit code. `--check` only compares.

What it says of a finding and of an error is what `samestep verify --explain` says; the tree is that of `errors.py`.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from generated import written

from samestep import errors
from samestep.verification.pages import KINDS, PAGES

PAGE = Path(__file__).parent.parent / "docs" / "codes.md"

BEGIN = """# Codes and errors

<!-- written by scripts/codes.py; `make readme` brings it up to date -->

What `samestep verify` and `samestep run --check` find, what samestep raises, and what its commands exit with: how it
comes about, and what fixes it. `samestep verify --explain CODE` prints the same of a finding's code or an error's name;
the messages themselves are in [every message](messages.md).

## Findings

A finding is an *error*, and then the training on N processes is another one, or a *note*: a difference that the script
asks for, such as local BatchNorm statistics. Only errors make the verdict "different". How findings come about:
[is it the same training?](verify.md).

| code | means |
|---|---|
"""

ERRORS = """
## Errors

Everything samestep raises on purpose is a `samestep.SamestepError`, and a message is a sentence with the rank, the
numbers, the cause and the next step.

```
{tree}
```

"""


EXITS = """## Exit codes

| code | of | means |
|---|---|---|
| 0 | every command | done; `verify`: the same training |
| 1 | `run` | the script failed with 1, or a rank left with 0 while others waited; with `--check`: an error was found |
| 1 | `verify` | a different training, or a crash or hang on N ranks that does not happen alone |
| 1 | `doctor`, `checkpoint`, `plan` | training would fail; a checkpoint is damaged or a sample lost; nothing fits |
| 2 | every command | a usage error, in one line that says how to fix it |
| 3 | `verify` | it cannot be said: the script fails alone too, the machine ended it, or what decides was not compared |
| 75 | `run` | asked to make room, all ranks have saved; the same command goes on |
| 124 | `run` | a hang that was stopped |
| 128 + N | `run` | signal N ended the rank that is to blame; 137 is SIGKILL, often for want of memory |
| 130 | every command | Ctrl-C |
| any other | `run` | the exit code of the rank that is to blame |
"""


def main() -> int:
    """Returns 0 where the page is what it should be, or is by now."""
    return written(PAGE, page(), "scripts/codes.py")


def page() -> str:
    """Returns the whole page."""
    rows = [f"| [`{code}`](#{code}) | {found.title} |\n" for code, found in PAGES.items()]
    findings = [_finding(code) for code in PAGES]
    kinds = [_error(name) for name in _in_order()]
    return "".join([BEGIN, *rows, *findings, ERRORS.format(tree=_tree()), *kinds, EXITS])


def _finding(code: str) -> str:
    found = PAGES[code]
    parts = (
        f"### {code}",
        f"*{_shown(found.title)}*",
        _shown(found.why),
        f"**Fix:** {_shown(_stop(found.fix))}",
        f"**Detected by:** {_shown(_stop(found.seen))}",
    )
    return "\n" + "\n\n".join(map(_wrapped, parts)) + "\n"


def _error(name: str) -> str:
    kind = getattr(errors, name)
    first = (kind.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
    parts = (
        f"### {name}",
        first.replace(":func:`", "`"),
        f"**Cause:** {KINDS[name].cause}",
        f"**Fix:** {KINDS[name].remedy}",
        f"**Exit code:** {kind.exit_code}",
    )
    return "\n\n".join(map(_wrapped, parts)) + "\n\n"


def _in_order() -> list[str]:
    """Returns the names in the order of the tree."""
    names = [name for name in errors.__all__ if name in KINDS]
    return sorted(names, key=(errors.__doc__ or "").index)


def _tree() -> str:
    """Returns the drawing at the top of errors.py."""
    lines = (errors.__doc__ or "").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.strip().startswith("SamestepError"))
    end = next(number for number, line in enumerate(lines) if line.strip().startswith("Preempted"))
    return "\n".join(line[4:].rstrip() for line in lines[begin : end + 1])


def _stop(text: str) -> str:
    return text if text.endswith((".", ")", "…")) and not text.endswith("(…)") else text + "."


def _shown(text: str) -> str:
    """Returns a text that means nothing to Markdown but itself."""
    for mark in ("\\", "*", "_", "<", ">", "[", "]", "$", "|"):
        text = text.replace(mark, "\\" + mark)
    return text


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 119, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
