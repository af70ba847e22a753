"""`samestep report`: a run directory as one page, as a trace, as data."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from samestep.cli.options import Parser
from samestep.errors import UsageError
from samestep.files import write_atomic
from samestep.text import escape_control

DESCRIPTION = """Makes a page of a run: is it the same training, where does the time go, what to change and what that
would gain; curves of what was logged, what every rank did in chosen steps, slow ranks, pipelines, the data's ledger,
checkpoints, findings. The page is one file that opens without a network. A run that goes on is shown as far as it is.

RUN_DIR is what `samestep run` names at its end, runs/<script>-<time>-<hex> by default; without it the newest run in
./runs is shown."""

EXAMPLES = """examples:
  samestep report                                             the newest run in ./runs
  samestep report runs/train-20260101-120000-1a2b             writes report.html into it
  samestep report runs/train-20260101-120000-1a2b -o page.html
  samestep report RUN_DIR --trace trace.json.gz               for ui.perfetto.dev or chrome://tracing
  samestep report RUN_DIR --json report.json                  the same numbers, for programs
  samestep report RUN_DIR --json - | jq .step                 them alone; a page only with -o
  samestep report RUN_DIR --attempt 0                         before the run was started again

exit code: 0, whatever became of the run; 2 for a usage error."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse(arguments)
    try:
        return _report(options)
    except UsageError as error:
        raise UsageError(escape_control(error)) from error  # it names files


def _report(options: argparse.Namespace) -> int:
    from samestep.reporting.analysis import analyse
    from samestep.reporting.run_log import PackingReader, json_safe, latest_run, open_run
    from samestep.reporting.summary import as_json, lines, summary
    from samestep.reporting.trace import trace

    options.path = options.path or latest_run(Path("runs"))
    alone = options.json == Path("-")  # the data are all that is printed, and the page is written only where asked for
    page = options.output or (None if alone else options.path / "report.html")
    _check_paths(page, options.trace, None if alone else options.json)
    analysis = analyse(open_run(options.path, PackingReader), options.attempt)
    found = summary(analysis, time.time())
    if options.json is not None:
        data = json.dumps(json_safe(as_json(analysis, found)), indent=2, allow_nan=False)
        write_atomic(Path("/dev/stdout") if alone else options.json, [data, "\n"])
    if options.trace is not None:
        write_atomic(options.trace, trace(analysis.run, analysis.logs))
    if page is not None:
        from samestep.reporting.page import render_page

        write_atomic(page, [render_page(analysis, found)])
    if alone:
        return 0
    for line in [*lines(found), *(f"note: {escape_control(problem)}" for problem in analysis.run.problems)]:
        print(_wrapped(line))
    for path in (page, options.trace, options.json):
        if path is not None:
            print(escape_control(path))
    return 0


def _wrapped(line: str) -> str:
    """Returns a line as a terminal shows it without cutting words; a file has a sentence a line."""
    if not sys.stdout.isatty():
        return line
    further = " " * (len(line) - len(line.lstrip()) + 2)
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def _parser() -> Parser:
    parser = Parser("report", usage="samestep report [RUN_DIR] [options]", description=DESCRIPTION, epilog=EXAMPLES)
    add = parser.add_argument
    add("path", metavar="RUN_DIR", type=Path, nargs="?", help="a run directory (default: the newest in ./runs)")
    add("-o", "--output", metavar="FILE", type=Path, help="the page (default: RUN_DIR/report.html)")
    add("--trace", metavar="FILE", type=Path, help="write a trace too, compressed if FILE ends in .gz")
    add(
        "--json",
        metavar="FILE",
        type=Path,
        help="write the summary as data too; - prints it, and nothing else",
    )
    add("--attempt", metavar="N", type=int, help="which attempt of a run that was started again (default: the last)")
    return parser


def _check_paths(page: Path | None, *others: Path | None) -> None:
    if page is not None:
        from samestep.reporting.page import check_library

        check_library()
    named = [path.resolve() for path in (page, *others) if path is not None]
    for path in named:
        try:
            is_folder = path.is_dir()
        except OSError as error:  # its name is too long, say
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        if is_folder:
            raise UsageError(f"{path} is a directory: name a file in it")
        if named.count(path) > 1:
            raise UsageError(f"page, trace and data need different files: {path} is named twice")
