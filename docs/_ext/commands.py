"""The directive `commands`: what every command says to `--help`, asked when the site is built."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from samestep.cli import COMMANDS

WIDTH = "96"  # columns


class Commands(SphinxDirective):
    """A section for each command, in the order of `samestep --help`."""

    def run(self) -> list[nodes.Node]:
        """Returns the sections."""
        with ThreadPoolExecutor(2) as asking:
            return [self._section(name, text) for name, text in zip(COMMANDS, asking.map(_help, COMMANDS), strict=True)]

    def _section(self, name: str, text: str) -> nodes.section:
        section = nodes.section(ids=[f"samestep-{name}"], names=[f"samestep {name}"])
        section += nodes.title("", f"samestep {name}")
        section += nodes.literal_block(text, text, language="text")
        self.state.document.note_explicit_target(section)
        return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _help(name: str) -> str:
    command = [sys.executable, "-m", "samestep", name, "--help"]
    environment = {**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.rstrip()
