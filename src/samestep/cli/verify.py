"""`samestep verify`: whether a script trains on N processes as it does on one."""

from __future__ import annotations

import argparse
import difflib
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from samestep.cli.checks import check_outputs, check_program, write_json, write_text
from samestep.cli.options import Parser, add_fake_gpus, add_local_rank, some_seconds, whole
from samestep.errors import UsageError
from samestep.fake_gpus import VARIABLE, about_fake_gpus
from samestep.fake_gpus.suggestion import suggest, wants_gpus
from samestep.launch.hosts import mpiexec
from samestep.launch.output.console import say
from samestep.launch.resources import check_room, visible_gpus
from samestep.rankenv import set_variables, variable
from samestep.verification.findings import EXIT_CODES
from samestep.verification.pages import KINDS, PAGES, explanation
from samestep.verification.recording.limit import STEPS
from samestep.verification.runs import HANG_TIMEOUT_S, Script

DESCRIPTION = """Checks that a script trains on N processes as it does on one, or names what is different.

The script runs unchanged on N ranks, and each writes down what it does: samples, gradients, parameters, collectives.
Then it runs alone, on the same samples and from the same parameters, and its gradients and updates are compared.
Dropout and autocast are off in all of these runs. They end after a few steps, and leave the script's files as they
were."""

EXAMPLES = """options stand before the script; everything after it is the script's.

examples:
  samestep verify train.py                       two ranks against one process
  samestep verify -n 3 --steps 50 train.py --lr 0.1
  samestep verify -v train.py                    with every property that was compared, and how well it agrees
  samestep verify --fake-gpus train.py           a script for CUDA and NCCL, on CPUs
  samestep verify --json report.json -m package.train
  samestep verify --markdown report.md train.py  for a pull request
  samestep verify --explain gradient-scale       the page of a finding, or of an error: --explain StepError

exit code: 0 the same training; 1 a different one; 3 it cannot be said (the script fails alone too, the machine ended
the ranks, or what would decide could not be compared); 2 for a usage error."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse(arguments)
    if options.explain is not None:
        return _explain(options.explain)
    if not options.program:
        raise UsageError("no script is given: `samestep verify train.py`, or `-m module`")
    program, *rest = options.program
    check_program(program, is_module=options.module)
    check_outputs(options, "json", "markdown")
    if options.mpi:
        mpiexec.mpiexec()  # there is one
    how = {"is_module": options.module, "mpi": options.mpi, "local_rank": options.local_rank}
    try:
        return _verify(options, Script(program=program, arguments=tuple(rest), **how))
    except KeyboardInterrupt as interruption:
        number = signal.Signals(interruption.args[0] if isinstance(interruption, _Interruption) else signal.SIGINT)
        say(f"{number.name} has ended the verification before its verdict; what it had started has ended too")
        return 128 + number


class _Interruption(KeyboardInterrupt):
    """A signal that asks for the end; its number."""


def _interrupt(number: int, _frame: object) -> NoReturn:
    raise _Interruption(number)


@contextmanager
def _ending(*numbers: int) -> Iterator[None]:
    """Lets these signals end what runs and remove what it has left, as Ctrl-C does; an ignored one (nohup) stays so."""
    before = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields what shows progress on standard error; on a terminal in one line, which is erased at the end."""
    is_terminal, began = sys.stderr.isatty(), time.monotonic()

    def show(what: str) -> None:
        line = f"samestep: {time.monotonic() - began:4.0f} s  {what}"
        sys.stderr.write(f"\r\x1b[K{line}" if is_terminal else f"{line}\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _verify(options: argparse.Namespace, script: Script) -> int:
    from samestep.verification.report import shown
    from samestep.verification.verify import examine

    if options.fake_gpus is not None:
        set_variables({VARIABLE: str(options.fake_gpus or options.ranks)})  # all runs of the script find it
        for line in about_fake_gpus(options.fake_gpus, options.ranks, visible_gpus()):
            say(line)
    with _ending(signal.SIGTERM, signal.SIGHUP), _progress() as progress:
        check_room(options.ranks)
        report = examine(script, options.ranks, steps=options.steps, still_s=options.timeout, say=progress)
    print(shown(report, verbose=options.verbose), end="")
    said = [report.inconclusive or "", *(finding.cause for finding in report.findings)]  # as yet unbroken into lines
    if options.fake_gpus is None and not variable(VARIABLE) and wants_gpus(said) and visible_gpus() < options.ranks:
        say(suggest("verify", script.program, visible_gpus(), options.ranks))
    code = write_text(options.markdown, report.as_markdown(), EXIT_CODES[report.verdict], option="--markdown")
    return write_json(options.json, report.as_json(), code)


def _explain(name: str) -> int:
    known = {name.lower(): name for name in (*PAGES, *KINDS)}
    code = known.get(name.lower())
    if code is None:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {known[close[0]]}?" if close else f"they are {', '.join((*PAGES, *KINDS))}"
        raise UsageError(f"there is no finding and no error {name!r}; {hint}")
    for paragraph in explanation(code):
        print(textwrap.fill(paragraph, 100) + "\n")
    return 0


def _parser() -> Parser:
    usage = "samestep verify [options] (script.py | -m module) [args…]"
    parser = Parser("verify", usage=usage, description=DESCRIPTION, epilog=EXAMPLES)
    add = parser.add_argument
    ranks = whole("number of ranks to compare with one", 2)
    add("-n", dest="ranks", metavar="N", type=ranks, default=2, help="ranks to compare with one process (default: 2)")
    add("-m", dest="module", action="store_true", help="what follows is a module's name, as with python -m")
    add("--mpi", action="store_true", help="have mpiexec start the ranks, for scripts whose backend is mpi")
    add_fake_gpus(parser, "one for each rank")
    add_local_rank(parser)
    add(
        "--steps",
        metavar="K",
        type=whole("number of steps", 1),
        default=STEPS,
        help="optimizer steps to compare, if the script takes as many (default: %(default)s)",
    )
    add("-v", "--verbose", action="store_true", help="show every property with its margin, and all remarks")
    add("--json", metavar="FILE", type=Path, help="write verdict, findings and coverage to this file")
    add("--markdown", metavar="FILE", type=Path, help="write the report for a pull request to this file")
    add(
        "--timeout",
        metavar="S",
        type=some_seconds,
        default=HANG_TIMEOUT_S,
        help="seconds in which no rank computes, reads or records anything until a run counts as hung "
        "(default: %(default)g)",
    )
    add("--explain", metavar="CODE", help="print the page of a finding, or of an error")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
