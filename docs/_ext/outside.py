"""Links that lead out of `docs/`, and pages that lie outside and belong to the site all the same.

A page links to `../examples/mpi_hello.py` as it must where the repository is shown. On the site MyST copies such a
file beside the pages; a folder cannot be copied, so its name stands there without a link. What PAGES names is a page
of the site: the short page in `docs/` that leads to it gives way to the text itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

PAGES = {
    "gallery": "examples/README.md",
    "zoo-scripts": "zoo/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "weaknesses": "SECURITY.md",
}
LINK = re.compile(r"\[(?P<words>[^\]\[]+)\]\((?P<target>(?!https?:)[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    app.connect("source-read", _bring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _bring(app: Sphinx, page: str, content: list[str]) -> None:
    docs = Path(app.srcdir)
    file = docs / f"{page}.md"
    if page in PAGES:
        file = docs.parent / PAGES[page]
        app.env.note_dependency(str(file), docname=page)
        content[0] = file.read_text(encoding="utf-8")
    content[0] = LINK.sub(lambda link: _led(link, file.parent, docs / Path(page).parent), content[0])


def _led(link: re.Match[str], written: Path, shown: Path) -> str:
    """Returns a link as it must be on a page of the site, or its words where it would lead nowhere."""
    target = Path(os.path.normpath(written / link["target"]))
    docs = Path(os.path.normpath(shown))
    docs = docs if docs.name == "docs" else docs.parent
    for name, file in PAGES.items():
        if target == docs.parent / file:
            target = docs / f"{name}.md"
    if target.is_dir():
        return link["words"]
    return f"[{link['words']}]({os.path.relpath(target, shown)}{link['anchor'] or ''})"
