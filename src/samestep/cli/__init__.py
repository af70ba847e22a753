"""Floor 7: the command line. One file a command, loaded only when it is asked for, so that help takes no torch."""

from __future__ import annotations

import difflib
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from samestep._version import __version__
from samestep.errors import SamestepError, UsageError
from samestep.launch.start import early_agent
from samestep.rankenv import set_variables, variable

COMMANDS = {  # each a module of this package with `main(arguments: Sequence[str]) -> int`; and its line in the help
    "run": "start a script on N processes, here or on several hosts",
    "verify": "prove that N processes train as one, or name what is different",
    "watch": "look at a run while it goes on, or afterwards",
    "report": "make a page of a run: the same training? where does its time go?",
    "checkpoint": "list, show, verify and convert what a run has saved",
    "plan": "predict a training on other machines, before renting them",
    "doctor": "would training work here, and what would be slow?",
    "bench": "time samestep beside the code it stands in for",
}

HELP = """usage: samestep COMMAND [options]

N processes take the same training step that one process would take.

commands:
{commands}

options:
  -h, --help  show this help
  --version   show the version

examples:
  samestep run -n 2 train.py --lr 0.1     train on two processes
  samestep run train.py                   one process per GPU, or one
  samestep verify train.py                is it the same training on two processes as on one?
  samestep run --help                     all options of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code; `argv` is `sys.argv[1:]` by default."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from samestep.launch.process import open_missing_streams

        open_missing_streams()
    for stream in (sys.stdout, sys.stderr):  # "…" and "µs" are no reason to fail where the locale has none of them
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except SamestepError as error:
        from samestep.launch.output.console import say

        say(f"error: {error}")  # which may quote a file that somebody else has written
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would complain at its end
        return 128 + signal.SIGPIPE


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        width = max(map(len, COMMANDS))
        rows = (f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
        print(HELP.format(commands="\n".join(rows)), end="")
        return 0
    if arguments[0] == "--version":
        print(f"samestep {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        raise UsageError(f"there is no command {arguments[0]!r}: {_advice(arguments)}")
    _check_place()
    if arguments[0] == "run":
        _apply_verify_variables()
        early_agent.begin(arguments[1:])
    try:
        code: int = import_module(f"samestep.cli.{arguments[0]}").main(arguments[1:])
    finally:
        early_agent.discard()
    return code


def _apply_verify_variables() -> None:
    """Makes a run that `samestep verify` has started end with it, and gives the run its own view of the files."""
    parent, overlay = variable("SAMESTEP_PARENT"), variable("SAMESTEP_OVERLAY")
    set_variables({"SAMESTEP_PARENT": None, "SAMESTEP_OVERLAY": None})
    if parent is not None:
        from samestep.launch.process import die_with_parent

        die_with_parent(int(parent))
    if overlay is not None:
        from samestep.launch.overlay import apply

        apply(overlay)


def _check_place() -> None:
    """Sees whether the current directory is there: relative paths, and those of a run's files, begin with it."""
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        raise UsageError("the current directory was deleted: go to one that is there, with cd") from None


def _advice(arguments: list[str]) -> str:
    if arguments[0].endswith(".py") or arguments[0] in {"-n", "-m"}:
        return f"did you mean `samestep run {' '.join(arguments)}`?"
    close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
    if close:
        return f"did you mean `samestep {close[0]}`?"
    return f"the commands are {', '.join(COMMANDS)}; `samestep --help` explains them"
