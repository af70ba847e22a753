"""Ranks of an mpiexec that are forked by the session's fork server: an import of torch less for each.

    mpiexec  ──starts──►  python -I -S mpi_rank.py SOCKET words…     a small process, which asks for the rank:
                              │ words, folder, variables, descriptors
    test process  ◄───────────┘
        └──► fork server ──fork──►  mpi_rank.py words…               the rank, with mpiexec's channel as descriptor 0

The small process ends as the rank ends, and the rank is killed where the small process is. The test process keeps
mpiexec's channel open until the small process has ended: where MPICH's mpiexec finds one closed it kills all ranks.
Whether it does so in time, and with whose exit code, is tested on processes that it has started itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

NOTHING = -1


class Starter:
    """The test process's end: starts what the small processes ask for."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-mpi-")
        self.path = str(Path(self._folder.name) / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def command(self, words):
        """Returns what mpiexec shall start in place of python with these words."""
        return [sys.executable, "-I", "-S", __file__, self.path, *words]

    def _accept(self):
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link):
        with link, contextlib.suppress(OSError):  # the small process was killed
            length, streams, *_ = socket.recv_fds(link, 8, 3)
            with link.makefile("rb") as file:
                asked = json.loads(file.read(int.from_bytes(length)))
            environment = asked["environment"]
            environment.pop("LD_LIBRARY_PATH", None)  # Open MPI's: it is read when a process starts, so not by a fork
            rank = subprocess.Popen(
                [sys.executable, __file__, *asked["words"]],
                cwd=asked["folder"],
                env=environment,
                **dict(zip(("stdin", "stdout", "stderr"), streams, strict=True)),
            )
            channel, *others = streams
            for stream in others:
                os.close(stream)
            process, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            small, handle = os.pidfd_open(process), os.pidfd_open(rank.pid)
            ready, _, _ = select.select([handle, small], [], [])
            if small in ready:
                rank.kill()
            else:
                link.sendall(rank.wait().to_bytes(8, "big", signed=True))
                select.select([small], [], [])
            for descriptor in (channel, small, handle):
                os.close(descriptor)
            rank.wait()


def ask(path, words):
    """The small process."""
    channel = int(os.environ.get("PMI_FD", NOTHING))
    streams = [os.open(os.devnull, os.O_RDONLY) if channel == NOTHING else channel, 1, 2]
    asked = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    request = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        socket.send_fds(link, [len(request).to_bytes(8)], streams)
        link.sendall(request)
        os.close(streams[0])
        code = int.from_bytes(link.recv(8) or b"\1", signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in {signal.SIGKILL, signal.SIGSTOP} else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def live(words):
    """The rank: what `python words…` does, up to the exit handlers; finalising a fork of torch may hang."""
    import atexit
    import runpy

    from samestep.launch.process import set_exit_code
    from samestep.launch.rank.script import run_script

    if "PMI_FD" in os.environ:
        channel = os.dup(0)
        os.set_inheritable(channel, True)
        os.environ["PMI_FD"] = str(channel)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    code = 0
    try:
        if words[:1] == ["-P"]:
            words = words[1:]
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy._run_module_as_main(words[1])
        else:
            run_script(words[0], words[1:])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  (the interpreter would end here, too)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if code == 0:
        set_exit_code(0, for_certain=True)  # else mpiexec would be told by the C library's exit handlers
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.flags.isolated:
        ask(sys.argv[1], sys.argv[2:])
    else:
        live(sys.argv[1:])
