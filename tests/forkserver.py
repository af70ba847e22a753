"""The fork server of the test session: what a test starts is forked from one process that has imported torch.

    test process  ──"start", descriptors──►  fork server (torch and samestep imported, nothing computed)
                                                  └──fork──►  samestep run …, python script.py …, a rank

A fresh interpreter imports torch for more than a second; a fork takes 20 ms. `Popen` behaves as `subprocess.Popen`,
which `conftest.py` replaces by it: a command that runs `samestep`, or a Python script, is forked, everything else
starts as always. A test whose subject is the start of an interpreter has the mark `fresh_interpreter`.

`ForkServer.ranks` starts functions as ranks that a test may kill. A `PreforkServer` of the test process, which forks
ranks and runs itself, is forked too, and so are all runs of a forked `samestep verify`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recvfds, sendfds
from pathlib import Path

from samestep.launch.process import ForkedProcess
from samestep.launch.process import start as start_process
from samestep.launch.start import prefork_server
from samestep.launch.start.fork import EARLY, _forked

TIMEOUT = 60.0  # seconds for ranks to end

BIN = Path(sys.executable).parent
PRELOADED = (
    "torch.distributed.run",
    "torch.nn.parallel",
    "numpy.testing",
    "scipy.stats",  # most of what scikit-learn imports, which itself some scripts replace
    "joblib",
    "samestep.cli.run",
    "samestep.planning.build_profile",
    "samestep.planning.profile_script",
    "samestep.planning.settings",
    "samestep.verification.recording.recorder",
    "samestep.verification.reference.replay",
)
HUGE_PAGE = 1 << 21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # madvise(2)
PREFORK_SERVER = prefork_server.__name__
FRESH = ["--start", "spawn", "--hash-seeds"]  # how `samestep verify` starts its first recording
THREADS = {"OMP_NUM_THREADS": "1"}

ORDINARY_POPEN = subprocess.Popen


class ForkServer:
    """The process that forks, as the test process sees it."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = ORDINARY_POPEN(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **THREADS},
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.closed = False

    def ask(self, *request, descriptors=()):
        with self._lock:
            self._connection.send(request)
            if descriptors:
                with socket.socket(fileno=os.dup(self._connection.fileno())) as link:
                    sendfds(link, descriptors)
            return self._connection.recv()

    def prefork_server(self, command, environment, *, keep):
        """Stands in for `launch.process.start` where a PreforkServer starts its process."""
        modules = command[command.index(PREFORK_SERVER) + 3 :]
        if not self.usable or changes_early_variables(environment):
            return start_process(command, environment, keep=keep)
        about = {
            "folder": str(Path.cwd()),
            "environment": environment,
            "cores": os.sched_getaffinity(0),
        }
        pid = self.ask("prefork server", modules, about, descriptors=[1, 2, *keep])
        return ForkedProcess(pid, lambda reap: self.ask("reap" if reap else "look", pid))

    @property
    def usable(self):
        return os.getpid() == self._owner  # a process that the test process has forked shares the connection

    def ranks(self, function, ranks, folder, *args):
        """Starts `function` ("path/of/file.py:name") with `args` on new ranks, which write their output to `folder`."""
        return ForkedRanks(self, self.ask("ranks", function, ranks, str(folder), args), Path(folder))

    def close(self):
        self.closed = True
        with socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)  # a process that this one has forked may hold it, too
        self._connection.close()
        self._process.wait(TIMEOUT)


class Popen(subprocess.Popen):
    """`subprocess.Popen`, whose process is forked by the server where that makes no difference to it."""

    server = None  # a function that returns the session's ForkServer; None while there is none

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        command = None if executable or preexec_fn or pass_fds or not close_fds else forked_command(args, env)
        self._forked_by = server = type(self).server() if command and type(self).server else None
        if server is None or not server.usable:
            self._forked_by = None
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
            return
        _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = others
        assert not shell
        streams = [number if given == -1 else given for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        about = {
            "folder": os.path.realpath(cwd or "."),
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()},
            "cores": os.sched_getaffinity(0),
        }
        if command[:2] == ("module", "samestep"):  # which forks no ranks if torch was imported for other threads
            about["environment"].setdefault("OMP_NUM_THREADS", THREADS["OMP_NUM_THREADS"])
        if not Path(about["folder"]).is_dir():
            raise FileNotFoundError(2, os.strerror(2), os.fspath(cwd))
        self.pid = server.ask("command", command, about, descriptors=streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *args, **options):
        if self._forked_by is None:
            return super()._internal_poll(*args, **options)
        with self._waitpid_lock:
            if self.returncode is None and not self._forked_by.closed:
                self.returncode = self._forked_by.ask("poll", self.pid)
        return self.returncode

    def _wait(self, timeout):
        if self._forked_by is None:
            return super()._wait(timeout)
        if self.returncode is None:
            handle = os.pidfd_open(self.pid)
            try:
                if not wait([handle], timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(handle)
            with self._waitpid_lock:
                if self.returncode is None:
                    self.returncode = self._forked_by.ask("reap", self.pid)
        return self.returncode


def forked_command(args, env):
    """Returns (kind, name, arguments) of a command that may be forked, or None.

    Options of the interpreter, code on the command line, and variables that are read when Python or torch starts take
    a fresh interpreter. So do commands that are told their parent's process number.
    """
    if isinstance(args, str | bytes) or not args:
        return None
    words = [os.fspath(word) for word in args]
    if any(isinstance(word, bytes) for word in words):
        return None
    if env is not None and any(isinstance(name, bytes) for name in env):
        return None
    if changes_early_variables(os.environ if env is None else env) or (env is not None and "SAMESTEP_PARENT" in env):
        return None
    program, *rest = words
    if program in {str(BIN / "samestep"), "samestep"}:
        return "module", "samestep", rest
    if program in {str(BIN / "torchrun"), "torchrun"}:
        return "module", "torch.distributed.run", rest
    if program not in {sys.executable, str(BIN / "python")}:
        return None
    if rest[:1] == ["-P"]:
        rest = rest[1:]
    if rest[:1] == ["-m"] and rest[1] in {"samestep", "torch.distributed.run"}:
        return "module", rest[1], rest[2:]
    if rest and rest[0].endswith(".py"):
        return "script", rest[0], rest[1:]
    return None


def changes_early_variables(environment):
    """Returns whether variables that are read when Python or torch starts differ from the fork server's."""
    early = {**os.environ, **THREADS}
    return any(
        name.startswith(EARLY)
        and name not in {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
        and early.get(name) != value
        for name, value in environment.items()
    )


class ForkedRanks:
    """The ranks of one start."""

    def __init__(self, server, pids, folder):
        self._server = server
        self._pids = pids
        self._handles = [os.pidfd_open(pid) for pid in pids]
        self._folder = folder

    def kill(self, *ranks):
        """Kills some ranks, or all."""
        for rank in ranks or range(len(self._handles)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)

    def wait_for(self, *pipes, seconds=TIMEOUT):
        """Waits until one of the pipes can be read or a rank has ended; returns whether that happened."""
        return bool(wait([*pipes, *self._handles], seconds))

    def end(self, seconds=TIMEOUT):
        """Waits until all have ended; returns their exit codes, minus the signal of those that were killed."""
        running, deadline = set(self._handles), time.monotonic() + seconds
        try:
            while running and (ended := wait(running, max(0, deadline - time.monotonic()))):
                running -= set(ended)
            if running:
                self._dump(running)
            assert not running, f"{len(running)} ranks have not ended within {seconds} s{self.output()}"
        finally:
            self.kill()
            codes = [self._server.ask("reap", pid) for pid in self._pids]
            for handle in self._handles:
                os.close(handle)
        return codes

    def _dump(self, running):
        """Makes ranks write their stacks, by faulthandler, and end."""
        for handle in running:
            signal.pidfd_send_signal(handle, signal.SIGABRT)
            wait([handle], 5)

    def output(self):
        """Returns what the ranks have printed."""
        return "".join(f"\n{path.name}: {path.read_text()}" for path in sorted(self._folder.glob("rank*.output")))


# --- in the server ------------------------------------------------------------------------------------------------


def main(descriptor):
    from samestep.launch.start.fork import preimport

    os.set_inheritable(descriptor, False)
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.enable()
    assert (problem := preimport("samestep", Path(os.devnull))) is None, problem
    drop_finalizers()
    use_huge_pages()
    connection = Connection(descriptor)
    started = {}
    with contextlib.suppress(EOFError, OSError):  # the test process has ended
        while True:
            match connection.recv():
                case "command", command, about:
                    child = start_command(command, about, received(connection, 3))
                    started[child.pid] = child
                    connection.send(child.pid)
                case "prefork server", modules, about:
                    child = start_prefork_server(modules, about, *received(connection, 3))
                    started[child.pid] = child
                    connection.send(child.pid)
                case "ranks", function, ranks, folder, args:
                    children = start_ranks(function, ranks, folder, args)
                    started |= {child.pid: child for child in children}
                    connection.send([child.pid for child in children])
                case "poll", pid:
                    if (code := exit_code(pid)) is not None:
                        started.pop(pid).wait()
                    connection.send(code)
                case "look", pid:
                    connection.send(exit_code(pid))
                case "reap", pid:
                    connection.send(started.pop(pid).wait())
    os._exit(0)


def drop_finalizers():
    """Drops the finalizers by which torch removes its operators one by one: 45 ms at the end of every fork."""
    for finalizer in list(weakref.finalize._registry):
        finalized = finalizer.peek()
        if finalized is not None and finalized[1].__module__ == "torch.library":
            finalizer.detach()


def use_huge_pages():
    """Moves this process's memory to huge pages: a fork then copies 1/500 of the page table and takes 5 ms, not 12.

    Where the kernel cannot, forks only take longer.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split()
        if permissions == "rw-p" and name in ([], ["[heap]"]):
            low, high = (int(address, 16) for address in addresses.split("-"))
            low, high = -(-low // HUGE_PAGE) * HUGE_PAGE, high // HUGE_PAGE * HUGE_PAGE
            for start in range(low, high, HUGE_PAGE):
                for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(HUGE_PAGE), advice)


def received(connection, number):
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        return recvfds(link, number)


def exit_code(pid):
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def start_command(command, about, streams):
    try:
        work = partial(run_command, command, about)
        return _forked(work, about["environment"], tuple(streams), [])
    finally:
        for stream in streams:
            os.close(stream)


def start_prefork_server(modules, about, stdout, stderr, link):
    try:
        work = partial(serve_forks, link, modules, about["folder"])
        return _forked(work, about["environment"], (None, stdout, stderr), [link])
    finally:
        for descriptor in (stdout, stderr, link):
            os.close(descriptor)


def serve_forks(link, modules, folder):
    os.chdir(folder)
    os.set_inheritable(link, False)
    try:
        prefork_server._serve(Connection(link), modules)
    except (EOFError, OSError):  # the caller has ended
        os._exit(0)
    except BaseException:  # noqa: BLE001  (printed, and the process ends)
        traceback.print_exc()


def fork_all_runs():
    """Has this process, a `samestep verify`, fork the first recording, too, and fork the server that forks its runs."""
    from samestep.verification import runner, runs

    servers = []

    class Server(prefork_server.PreforkServer):
        def __init__(self, *args):
            super().__init__(*args)
            servers.append(self)

    def forked_server(command, environment, *, keep):
        modules = command[command.index(PREFORK_SERVER) + 3 :]
        work = partial(serve_forks, *keep, modules, Path.cwd())
        return _forked(work, environment, (None, 1, 2), keep)

    def started(arguments, environment, output, server):
        at = arguments.index("--start")
        if server is None and servers and arguments[at : at + 3] == FRESH:
            server = servers[-1]
            assert (problem := server.why_unavailable()) is None, problem
            arguments = [*arguments[:at], "--start", "fork", *arguments[at + 3 :]]
        return start_run(arguments, environment, output, server)

    start_run = runs._start
    prefork_server.start, runner.PreforkServer, runs._start = forked_server, Server, started


def run_command(command, about):
    from samestep.launch.rank.bootstrap import leave

    kind, name, arguments = command
    os.chdir(about["folder"])
    os.sched_setaffinity(0, about["cores"])
    tempfile.tempdir = None  # TMPDIR may be another
    renew_random_numbers()
    try:
        if kind == "script":
            from samestep.launch.rank.script import run_script

            run_script(name, arguments)
        else:
            import runpy

            if (name, *arguments[:1]) == ("samestep", "verify"):
                fork_all_runs()
            sys.argv[:] = [name, *arguments]
            runpy._run_module_as_main(name)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  (the interpreter would end here, too)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        code = 1
        try:
            sys.excepthook(type(error), error, own_frames_removed(error.__traceback__))
        except SystemExit as end:  # as Python does with one that a hook raises
            code = end.code
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    leave(code)


def own_frames_removed(trace):
    own = {__file__, importlib.import_module("samestep.launch.rank.script").__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def renew_random_numbers():
    import numpy as np
    import torch

    torch.set_num_threads(torch.get_num_threads())
    torch.default_generator.seed()
    np.random.seed()


def start_ranks(function, ranks, folder, args):
    from samestep.launch.rank.store import listen_on_loopback

    with listen_on_loopback() as listener:
        return [start_rank(rank, listener, function, ranks, folder, args) for rank in range(ranks)]


def start_rank(rank, listener, function, ranks, folder, args):
    from samestep.launch.process import ForkedProcess

    server = os.getpid()
    if pid := os.fork():
        return ForkedProcess(pid)
    code = 70
    try:
        become_rank(rank, listener, ranks, folder, server)
        file, _, name = function.partition(":")
        sys.path.insert(0, str(Path(file).parent))
        getattr(importlib.import_module(Path(file).stem), name)(*args)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  (printed, and the process ends)
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become_rank(rank, listener, ranks, folder, server):
    """Makes a fork one of the ranks of a launcher."""
    from samestep.launch.monitor.attach import set_watched
    from samestep.launch.process import die_with_parent
    from samestep.launch.rank.environment import RankLayout, rank_variables
    from samestep.launch.rank.store import serve_store, use_store
    from samestep.rankenv import set_variables

    die_with_parent(server)
    output = os.open(Path(folder) / f"rank{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, number)
    faulthandler.enable()
    port = listener.getsockname()[1]
    set_variables(rank_variables(RankLayout(size=ranks, port=port, run_id=f"test-{port}"), rank))
    set_watched()
    use_store()
    if rank == 0:
        serve_store(listener, ranks)
    else:
        listener.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
