"""Ranks that a test may kill: forked, a few milliseconds each, from a process that has imported torch once.

The ranks of `samestep.testing` are kept alive between tests, and a killed one costs the start of a new interpreter, two
seconds. Here a test process tells a mother what to fork, and kills what it likes through handles of its own:

    test  ──"start"──►  mother (torch imported, nothing computed)  ──fork──►  rank 0, rank 1, …
      └───── SIGKILL, through a pidfd, at any moment ───────────────────────────┘

The mother alone reaps, and only when told to, so that no number is used again while a test still has it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

PATIENCE = 60.0


class Herd:
    """The mother, as the test sees her. `modules`, each with its folder, hold the functions that ranks will run."""

    def __init__(self, *modules):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", __file__, *map(str, modules)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def start(self, function, ranks, folder, *args):
        """Starts `function` ("module:name") with `args` on new ranks, which leave what they print in `folder`."""
        pids = self.ask(start=function, ranks=ranks, folder=str(folder), args=args)
        return Team(self, pids, Path(folder))

    def ask(self, **order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


class Team:
    """The ranks of one start."""

    def __init__(self, herd, pids, folder):
        self._herd = herd
        self._pids = pids
        self._handles = [os.pidfd_open(pid) for pid in pids]
        self._folder = folder

    def kill(self, *ranks):
        """Kills some ranks, or all."""
        for rank in ranks or range(len(self._handles)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)

    def wait_for(self, *pipes, seconds=PATIENCE):
        """Waits until something stands in one of the pipes, or a rank has ended; returns whether any of it came."""
        return bool(wait([*pipes, *self._handles], seconds))

    def end(self, seconds=PATIENCE):
        """Waits until all have ended; returns their exit codes, minus the signal of those that were killed."""
        running, deadline = set(self._handles), time.monotonic() + seconds
        try:
            while running and (ended := wait(running, max(0, deadline - time.monotonic()))):
                running -= set(ended)
            if running:
                self._dump(running)
            assert not running, f"{len(running)} ranks have not ended within {seconds} s{self.said()}"
        finally:
            self.kill()
            codes = self._herd.ask(reap=self._pids)
            for handle in self._handles:
                os.close(handle)
        return codes

    def _dump(self, running):
        """Lets ranks say where they stand: faulthandler writes their stacks, and they end."""
        for handle in running:
            signal.pidfd_send_signal(handle, signal.SIGABRT)
            wait([handle], 5)

    def said(self):
        """What the ranks have printed, for a test that failed."""
        return "".join(f"\n{path.name}: {path.read_text()}" for path in sorted(self._folder.glob("rank*.said")))


# --- the mother's side --------------------------------------------------------------------------


def main(files):
    from samestep.launch.fork import warm

    assert (problem := warm("samestep", Path())) is None, problem
    for file in map(Path, files):
        sys.path.insert(0, str(file.parent))
        importlib.import_module(file.stem)
    while line := sys.stdin.readline():
        order = json.loads(line)
        told = started(order) if "start" in order else [reaped(pid) for pid in order["reap"]]
        print(json.dumps(told), flush=True)


def started(order):
    from samestep.launch.address import listen_on_loopback

    with listen_on_loopback() as listener:
        return [forked(rank, listener, order) for rank in range(order["ranks"])]


def reaped(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(rank, listener, order):
    mother = os.getpid()
    if pid := os.fork():
        return pid
    code = 70
    try:
        become(rank, listener, order, mother)
        module, _, name = order["start"].partition(":")
        getattr(sys.modules[module], name)(*order["args"])
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # noqa: BLE001  (told, and the process ends)
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become(rank, listener, order, mother):
    """Makes a fork one of the ranks of a launcher."""
    from samestep.launch.address import serve_store, use_store
    from samestep.launch.process import follow_parent
    from samestep.launch.variables import Group, rank_variables
    from samestep.launch.watched import note_watched
    from samestep.rankenv import set_variables

    follow_parent(mother)
    said = os.open(Path(order["folder"]) / f"rank{rank}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, said, said)):
        os.dup2(descriptor, number)
    faulthandler.enable()
    port = listener.getsockname()[1]
    set_variables(rank_variables(Group(size=order["ranks"], port=port, run_id=f"herd-{port}"), rank))
    note_watched()
    use_store()
    if rank == 0:
        serve_store(listener, order["ranks"])
    else:
        listener.close()


if __name__ == "__main__":
    main(sys.argv[1:])
