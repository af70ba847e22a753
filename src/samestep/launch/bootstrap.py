"""The one piece that runs in every rank before the script, however it was started.

    python -P -m samestep.launch.bootstrap --parent PID [--store FD] [--stacks FD] [--error FILE]
                                           (--calls FD | -m module args… | script.py args…)

It asks to die with its parent, keeps a record of an uncaught exception, and leaves the process in a way that gloo
survives: its run-loop thread needs the interpreter's lock to release its last tensors, so a process whose training
went well can still abort or hang while the interpreter finalises. Here the script's threads are joined, its atexit
handlers run and its output is flushed as python would; then `os._exit` skips the finalisation.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import os
import socket
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from samestep.launch.address import serve_store
from samestep.launch.calls import serve_calls
from samestep.launch.failure import Failure, below_the_launcher, brief, describe
from samestep.launch.process import follow_parent
from samestep.launch.script import run_module, run_script
from samestep.rankenv import variable

__all__: list[str] = []


def main() -> NoReturn:
    """Runs what the command line names and leaves the process with its exit code."""
    options = _parse(sys.argv[1:])
    follow_parent(options.parent)
    faulthandler.enable(file=sys.stderr if options.stacks is None else options.stacks, all_threads=True)
    rank, size = int(variable("RANK") or 0), int(variable("WORLD_SIZE") or 1)
    if options.store is not None:
        os.set_inheritable(options.store, False)
        serve_store(socket.socket(fileno=options.store), size)
    try:
        _run(options, rank, size)
    except BaseException as error:  # noqa: BLE001  (SystemExit and KeyboardInterrupt too: all end the rank here)
        leave(_report(error, rank, options.error))
    leave(0)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="samestep.launch.bootstrap", allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True, help="end when this process ends")
    parser.add_argument("--store", type=int, help="serve the store on this inherited socket")
    parser.add_argument("--stacks", type=int, help="write fatal stacks to this inherited file, not to stderr")
    parser.add_argument("--error", type=Path, help="write the record of a failure here")
    parser.add_argument("--calls", type=int, help="answer calls on this inherited socket")
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, rank: int, size: int) -> None:
    if options.calls is not None:
        os.set_inheritable(options.calls, False)
        serve_calls(Connection(options.calls), rank, size)
        return
    program, *arguments = options.program
    run = run_module if options.module else run_script
    run(program, arguments)


def _report(error: BaseException, rank: int, record: Path | None) -> int:
    """Writes an uncaught exception down, prints what python would, and returns the exit code."""
    failure = describe(error, rank)
    if record is not None and failure.exit_code != 0:
        failure.write(record)
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)  # noqa: T201
    elif record is not None and failure.lost_peer and not failure.usage:
        sys.stderr.write(_in_one_line(failure, record))
    elif not (record is not None and failure.usage) and not isinstance(error, KeyboardInterrupt):
        _print_traceback(error, failure)  # a usage error is the launcher's to show, once for all ranks
    return failure.exit_code


def _in_one_line(failure: Failure, record: Path) -> str:
    """A victim's traceback is kept, but must not bury the culprit's."""
    return f"lost its peers at {failure.where}: {brief(failure.message)} (traceback in {record.name})\n"


def _print_traceback(error: BaseException, failure: Failure) -> None:
    hook = sys.excepthook
    if hook is sys.__excepthook__ or hook.__module__.startswith("torch."):  # torch's adds a rank, which we show too
        sys.stderr.write(failure.traceback)  # in one piece, so that the ranks' lines do not mix
    else:  # the script has installed its own
        hook(type(error), error, below_the_launcher(error.__traceback__))


def leave(code: int) -> NoReturn:
    """Ends the process as python would, short of finalising the interpreter (see the top of this file)."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  (joins what python joins, nothing else does)
        atexit._run_exitfuncs()  # noqa: SLF001
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    os._exit(_flush() or code)


def _flush() -> int:
    """Flushes both streams; returns python's own exit code 120 where one cannot be written any more."""
    failed = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the script closed it
            failed = 120
    return failed


if __name__ == "__main__":
    main()
