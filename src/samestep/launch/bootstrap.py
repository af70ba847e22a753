"""The one piece that runs in every rank before the script, however it was started.

    python -P -m samestep.launch.bootstrap --parent PID [--control FD] [--stacks FD] [--store FD]
                                           (--calls FD | -m module args… | script.py args…)

A forked rank (:mod:`samestep.launch.fork`) comes in by :func:`live`, without the command line. Either way it asks to
die with its parent, obeys orders, keeps a record of an uncaught exception, and leaves the process in a way that gloo
survives: its run-loop thread needs the interpreter's lock to release its last tensors, so a process whose training
went well can still abort or hang while the interpreter finalises. Here the script's threads are joined, its atexit
handlers run, its output is flushed and the files that it left open are written out as python would; then `os._exit`
skips the finalisation. What is lost is `__del__` of other objects that the script still holds.

A child that the script makes with `os.fork` comes back through here too, and ends for itself alone.

Signal 40 makes a rank write the Python stacks of all its threads, even while native code holds the interpreter's
lock. SIGUSR1 and SIGUSR2, which torch and submitit use for it, stay the scheduler's and the script's.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import gc
import io
import os
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import NoReturn, cast

from samestep import fake_gpus, progress
from samestep.errors import Preempted
from samestep.launch import observers
from samestep.launch.address import serve_store, use_store
from samestep.launch.control import Control
from samestep.launch.failure import format_traceback, show_from_here, text_in
from samestep.launch.process import die_with_parent, set_exit_code
from samestep.launch.script import run_module, run_script
from samestep.launch.spawned import describe_with_spawned
from samestep.launch.stacks import STACKS_SIGNAL
from samestep.launch.telling import says_it_all, show, write_stderr
from samestep.launch.watched import note_watched
from samestep.rankenv import variable

__all__: list[str] = []

WRITING_S = 20.0  # how long files that were left open may take: one may lead to a reader that does not read
_OF_PYTHON = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.BytesIO)


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What a rank is told beside its variables; the numbers are descriptors that it inherits.

    `control` leads to its team; `stacks` is the file for fatal stacks (standard error without one); on `store` it
    serves the store; `progress` is the memory that it notes its steps in; `calls` brings functions, in place of the
    program.
    """

    program: tuple[str, ...] = ()
    is_module: bool = False
    control: int | None = None
    stacks: int | None = None
    store: int | None = None
    progress: int | None = None
    calls: int | None = None

    def options(self) -> list[str]:
        """Returns it as a command line for :func:`main`."""
        fields = ("control", "stacks", "store", "progress", "calls")
        given = [(name, getattr(self, name)) for name in fields]
        options = [text for name, value in given if value is not None for text in (f"--{name}", str(value))]
        return [*options, *(["-m"] if self.is_module else []), *self.program]

    def descriptors(self) -> list[int]:
        """Returns what the rank must inherit."""
        return [fd for fd in (self.control, self.stacks, self.store, self.progress, self.calls) if fd is not None]


def main() -> NoReturn:
    """Does what the command line says and leaves the process with its exit code."""
    options = vars(_parse(sys.argv[1:]))
    die_with_parent(options.pop("parent"))
    live(RankTask(**options | {"program": tuple(options["program"])}))


def live(assignment: RankTask) -> NoReturn:
    """Runs what the rank was told to, and leaves the process with its exit code."""
    stacks = sys.stderr.fileno() if assignment.stacks is None else assignment.stacks
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    rank, size = int(variable("RANK") or 0), int(variable("WORLD_SIZE") or 1)
    process = os.getpid()
    note_watched()
    show_from_here()
    control = None if assignment.control is None else Control(assignment.control)
    if assignment.progress is not None:
        progress.attach(assignment.progress)
    if assignment.store is not None:
        os.set_inheritable(assignment.store, False)
        serve_store(socket.socket(fileno=assignment.store), size)
    if not variable("PYTHONUNBUFFERED"):
        cast("io.TextIOWrapper", sys.stdout).reconfigure(
            line_buffering=True
        )  # a pipe's lines shall come when they are whole
    if assignment.calls is None:
        use_store()
    if control is not None:
        control.obey()
    try:
        _make_gpus()
        observers.begin(rank, size)
        _run(assignment, rank, size)
        observers.end(None)
    except BaseException as error:  # noqa: BLE001  (SystemExit and KeyboardInterrupt too: all end the rank here)
        code = _report(error, rank, control if os.getpid() == process else None)  # a forked child's is not the rank's
        _end_observers(error)
        leave(code)
    leave(0)


def _make_gpus() -> None:
    """Makes fake GPUs where they were asked for."""
    gpus = fake_gpus.requested()
    if gpus is not None:
        fake_gpus.install(gpus)


def _end_observers(error: BaseException) -> None:
    try:
        observers.end(error)
    except Exception as other:  # noqa: BLE001  (the script's own exception is what ends this rank)
        write_stderr(format_traceback(other))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="samestep.launch.bootstrap", allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True, help="end when this process ends")
    parser.add_argument("--control", type=int, help="obey and report on this inherited socket")
    parser.add_argument("--stacks", type=int, help="write fatal stacks to this inherited file, not to stderr")
    parser.add_argument("--store", type=int, help="serve the store on this inherited socket")
    parser.add_argument("--progress", type=int, help="note steps in this inherited memory")
    parser.add_argument("--calls", type=int, help="answer calls on this inherited socket")
    parser.add_argument("-m", dest="is_module", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def _run(assignment: RankTask, rank: int, size: int) -> None:
    if assignment.calls is not None:
        from multiprocessing.connection import Connection  # a run of a script needs neither

        from samestep.launch.calls import serve_calls

        os.set_inheritable(assignment.calls, False)
        serve_calls(Connection(assignment.calls), rank, size)
        return
    program, *arguments = assignment.program
    run = run_module if assignment.is_module else run_script
    run(program, arguments)


def _report(error: BaseException, rank: int, control: Control | None) -> int:
    """Tells the launcher of an uncaught exception, prints what python would, and returns the exit code."""
    failure = describe_with_spawned(error, rank)
    if control is not None and says_it_all(error, failure):
        failure = replace(failure, in_short=True)
    if isinstance(error, Preempted):
        if control is not None:
            control.tell("preempted", step=error.step, path=str(error.path))
    elif control is not None and failure.exit_code != 0:
        control.tell("failed", failure=asdict(failure))
    show(error, failure, launched=control is not None)
    return failure.exit_code


def leave(code: int) -> NoReturn:
    """Ends the process as python would, short of finalising the interpreter (see the top of this file)."""
    set_exit_code(code, for_certain=True)
    for last in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]  # noqa: SLF001
        try:
            last()  # joins and calls what python does, for which there is no other way
        except BaseException as error:  # noqa: BLE001  (a second Ctrl-C, say)
            write_stderr(f"Exception ignored in: {last!r}\n{format_traceback(error)}")
    writing = threading.Thread(target=_write_out, daemon=True)
    writing.start()
    writing.join(WRITING_S)
    os._exit(code if _flush() else 120)  # python's own code where its output cannot be written any more


def _write_out() -> None:
    """Writes out the files that the script has left open, which python's finalisation does by closing them."""
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if io.IOBase.__base__ in kind.__mro__}
    left = [thing for thing in things if type(thing) in kinds]
    texts = [file for file in left if isinstance(file, io.TextIOWrapper)]
    plain = [file for file in left if isinstance(file, io.BufferedWriter | io.BufferedRandom)]
    packed = [file for file in left if isinstance(file, io.BufferedIOBase) and not isinstance(file, _OF_PYTHON)]
    for act, files in ((_flush_one, texts), (_close_one, packed), (_flush_one, plain)):  # each lies above the next
        for file in files:
            with suppress(Exception):
                act(file)


def _flush_one(file: io.IOBase) -> None:
    if file not in (sys.stdout, sys.stderr) and not file.closed and file.writable():
        file.flush()


def _close_one(file: io.IOBase) -> None:
    if not file.closed and file.writable():  # a GzipFile ends with a sum
        file.close()


def _flush() -> bool:
    """Flushes both streams as python does at its end; returns whether what the script had written has gone out."""
    good = True
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        if stream is None or _is_closed(stream):  # the script's own doing
            continue
        try:
            stream.flush()
        except Exception as error:  # noqa: BLE001  (the reader is gone, or it is something of the script's own)
            good = False
            if name == "stdout":
                write_stderr(f"Exception ignored in: {name}\n{type(error).__name__}: {text_in(error)}\n")
    for own in (sys.__stdout__, sys.__stderr__):  # below what the script may have put in their place
        with suppress(Exception):
            own.flush()  # type: ignore[union-attr]
    return good


def _is_closed(stream: object) -> bool:
    try:
        return bool(stream.closed)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001
        return False


if __name__ == "__main__":
    main()
