"""`samestep watch`: a run in a terminal, while it goes on or afterwards."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from samestep.cli.options import Parser
from samestep.errors import UsageError

DESCRIPTION = """Shows a run of `samestep run` while it goes on, or after its end: where each rank's last steps
went, what it is at, what the launcher and --check have found, what the ranks print. It only reads the
run directory; the run takes no notice.

Without RUN_DIR the newest run in ./runs is shown. Where standard output is no terminal, one picture is printed."""

EXAMPLES = """examples:
  samestep watch                                          the newest run in ./runs
  samestep watch runs/train-20260101-120000-1a2b
  samestep watch --once --rank 3 | less                   one picture, with the last lines of rank 3
  ssh node1 -t samestep watch /shared/runs/mine           from another machine

keys: up, down or j, k choose a rank; Tab stdout or stderr; f events; n the next problem rank; a attempt;
      Space pause; ? all keys; q or Ctrl-C leave.

exit code: 0, whatever became of the run; 2 for a usage error."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    try:
        return _watch(_parser().parse(arguments))
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> Parser:
    parser = Parser("watch", usage="samestep watch [RUN_DIR] [options]", description=DESCRIPTION, epilog=EXAMPLES)
    add = parser.add_argument
    add("path", metavar="RUN_DIR", type=Path, nargs="?", help="a run directory (default: the newest in ./runs)")
    add("--once", action="store_true", help="print one picture and end, on a terminal too")
    add("--rank", metavar="K", type=int, help="whose output is shown at first (default: the rank to blame, or 0)")
    return parser


def _watch(options: argparse.Namespace) -> int:
    from rich.console import Console

    from samestep.reporting.live.app import WatchApp
    from samestep.reporting.live.log_tail import open_latest
    from samestep.reporting.live.model import ViewState
    from samestep.reporting.run_log import latest_run
    from samestep.text import escape_control

    path = options.path or latest_run(Path("runs"))
    try:
        run = open_latest(path)
    except (UsageError, OSError) as error:
        raise UsageError(escape_control(error)) from error
    console = Console(highlight=False, markup=False, emoji=False)
    view = WatchApp(run, console, ViewState(rank=options.rank))
    if options.rank is not None and options.rank not in view.model.ranks:
        raise UsageError(f"--rank {options.rank}: {escape_control(path)} has {_ranks(view.model.ranks)}")
    if options.once or not console.is_terminal or console.is_dumb_terminal:
        view.once()
        return 0
    return view.live()


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no ranks"
    return f"ranks {ranks[0]} to {ranks[-1]}" if ranks[1:] else f"rank {ranks[0]}"
