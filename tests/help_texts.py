"""What the commands of samestep say to `--help`, asked within the process of the tests."""

from __future__ import annotations

import contextlib
import functools
import io
import re

from samestep.cli import main


@functools.cache
def help_of(command):
    """Returns the help text of a command."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return shown.getvalue()


def options_of(command):
    """Returns the options that a command takes, short ones included."""
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_of(command)))
