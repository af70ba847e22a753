"""What runs in every rank around the script: `bootstrap PARENT_PID TASK_AS_JSON (module | script.py) args…`.

A forked rank (samestep.launch.start.fork) enters by :func:`run_rank`. A child that the script makes with `os.fork`
returns through here too, and ends for itself alone.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import json
import os
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import NoReturn, cast

from samestep import fake_gpus, progress
from samestep.errors import Preempted
from samestep.launch.monitor.attach import set_watched
from samestep.launch.process import die_with_parent, interpreter_command, set_exit_code
from samestep.launch.rank import observers
from samestep.launch.rank.control import Control
from samestep.launch.rank.excepthook import needs_no_traceback, print_exception, write_stderr
from samestep.launch.rank.failure import describe
from samestep.launch.rank.script import run_module, run_script
from samestep.launch.rank.store import serve_store, use_store
from samestep.launch.rank.user_code import STACKS_SIGNAL, format_traceback, show_from_here, text_in, tried
from samestep.rankenv import variable

WRITING_S = 20.0  # how long files that were left open may take: one may lead to a reader that does not read
_OF_PYTHON = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.BytesIO)


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What a rank needs beyond its variables; the numbers are descriptors that it inherits.

    `control` leads to the process that watches it; `stacks` is the file for fatal stacks (standard error without one);
    on `store` it serves the store; `progress` is its progress record; `calls` brings functions instead of a program.
    """

    program: tuple[str, ...] = ()
    is_module: bool = False
    control: int | None = None
    stacks: int | None = None
    store: int | None = None
    progress: int | None = None
    calls: int | None = None

    def command(self) -> list[str]:
        all_fields = asdict(replace(self, program=()))
        fields = {name: value for name, value in all_fields.items() if value not in (None, False, ())}
        words = (str(os.getpid()), json.dumps(fields), *self.program)
        return interpreter_command("samestep.launch.rank.bootstrap", *words)

    def descriptors(self) -> list[int]:
        return [fd for fd in (self.control, self.stacks, self.store, self.progress, self.calls) if fd is not None]


def main() -> NoReturn:
    _, parent, task, *program = sys.argv
    die_with_parent(int(parent))
    run_rank(RankTask(program=tuple(program), **json.loads(task)))


def run_rank(task: RankTask) -> NoReturn:
    stacks = sys.stderr.fileno() if task.stacks is None else task.stacks
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    rank, size = int(variable("RANK") or 0), int(variable("WORLD_SIZE") or 1)
    process = os.getpid()
    set_watched()
    show_from_here()
    control = None if task.control is None else Control(task.control, stacks)
    if task.progress is not None:
        progress.attach(task.progress)
    if task.store is not None:
        os.set_inheritable(task.store, False)
        serve_store(socket.socket(fileno=task.store), size)
    if not variable("PYTHONUNBUFFERED"):  # else lines would stay in the buffer of a pipe
        cast("io.TextIOWrapper", sys.stdout).reconfigure(line_buffering=True)
    if task.calls is None:
        use_store()
    if control is not None:
        control.start()
    try:
        gpus = fake_gpus.requested()
        if gpus is not None:
            fake_gpus.install(gpus)
        observers.begin(rank, size)
        _run(task, rank, size)
        observers.end(None)
    except BaseException as error:  # noqa: BLE001  (SystemExit and KeyboardInterrupt too: all end the rank here)
        code = _report(error, rank, control if os.getpid() == process else None)  # a forked child's is not the rank's
        try:
            observers.end(error)
        except Exception as other:  # noqa: BLE001  (the script's own exception is what ends this rank)
            write_stderr(format_traceback(other))
        leave(code)
    leave(0)


def _run(task: RankTask, rank: int, size: int) -> None:
    if task.calls is not None:
        from multiprocessing.connection import Connection  # a run of a script needs neither

        from samestep.launch.functions.calls import serve_calls

        os.set_inheritable(task.calls, False)
        serve_calls(Connection(task.calls), rank, size)
        return
    program, *arguments = task.program
    run = run_module if task.is_module else run_script
    run(program, arguments)


def _report(error: BaseException, rank: int, control: Control | None) -> int:
    """Tells the launcher of an uncaught exception, prints what python would, and returns the exit code."""
    failure = describe(error, rank)
    if control is not None and needs_no_traceback(error, failure):
        failure = replace(failure, in_short=True)
    if isinstance(error, Preempted):
        if control is not None:
            control.send("preempted", step=error.step, path=str(error.path))
    elif control is not None and failure.exit_code != 0:
        control.send("failed", failure=asdict(failure))
    print_exception(error, failure, launched=control is not None)
    return failure.exit_code


def leave(code: int) -> NoReturn:
    """Ends the process as python would, short of finalising the interpreter.

    gloo's threads need the interpreter's lock to release their last tensors: a process whose training went well could
    abort or hang meanwhile. What is lost is `__del__` of objects that the script still holds.
    """
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
    for act, files in ((_flush_one, texts), (_close_one, packed), (_flush_one, plain)):  # each is above the next
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
        if stream is None or tried(lambda: bool(stream.closed), False):  # noqa: B023  # the script's own doing
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


if __name__ == "__main__":
    main()
