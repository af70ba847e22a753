"""Runs PyTorch's own backend-generic tests of torch.distributed, which ship inside torch, against the backend samestep.

    .venv/bin/python scripts/torch_suite.py                          all of them, with 2 ranks
    .venv/bin/python scripts/torch_suite.py --ranks 3 --repeat 10
    .venv/bin/python scripts/torch_suite.py --backend gloo           what they say of gloo here
    .venv/bin/python scripts/torch_suite.py -k "all_reduce or ddp_hook"
    .venv/bin/python scripts/torch_suite.py --backend mpi            with the mpiexec beside this Python
    .venv/bin/python scripts/torch_suite.py --backend mpi --mpiexec "mpiexec.openmpi --oversubscribe --bind-to none"
    .venv/bin/python scripts/torch_suite.py --backend mpi --chosen mpi

torch decides by the backend's name which tests may run, and knows samestep as little as any plugin. So the tests are
chosen as for gloo, and then run over samestep. Left out are those of `monitored_barrier`, which asks for gloo by name.

MPI's tests torch knows, and chooses few: none of DDP or of subgroups, but those of all-to-all. So over mpi too they are
chosen as for gloo, less those of sparse tensors, which MPI does not add up; `--chosen mpi` runs torch's own choice.
Processes that use MPI cannot be forked. So torch's harness, which wants a process for each rank of each test, gets a
turn of a rank that mpiexec has started; the ranks stay until a test fails, and are then replaced. Each test makes and
destroys the default process group, as elsewhere.

Exit code 0 when no test fails.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve()
OURS = (HERE.parents[1] / "src", HERE.parent)  # folders to import from


def main() -> int:
    """Runs the tests as often as asked, and sums up."""
    asked = parsed()
    failed = 0
    for number in range(1, asked.repeat + 1):
        code, summary = run(asked)
        print(f"run {number} of {asked.repeat}, {asked.ranks} ranks over {asked.backend}: {summary}", flush=True)
        failed += code != 0
    return int(failed > 0)


def parsed() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="samestep")
    parser.add_argument("--chosen", choices=("gloo", "mpi"), default="gloo", help="whose tests")
    parser.add_argument("--mpiexec", default=str(Path(sys.executable).with_name("mpiexec")), help="with its options")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=60, help="seconds that one test may take")
    parser.add_argument("-k", default="", help="which tests, as for pytest")
    return parser.parse_args()


def run(asked: argparse.Namespace) -> tuple[int, str]:
    """Runs the tests once in a process of their own; returns its exit code and pytest's last line."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rfE", "-k", asked.k, *FREE_OF_OURS, str(HERE)],
            env={**os.environ, **variables(asked, folder)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode, re.sub(r"^=+ | =+$", "", lines[-1])


# torch's tests warn, are ordered, and may last; our own settings for tests are not theirs
FREE_OF_OURS = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", "/")


def variables(asked: argparse.Namespace, folder: str) -> dict[str, str]:
    """Returns what torch's tests read when they are imported."""
    return {
        "BACKEND": asked.chosen,
        "SUITE_BACKEND": asked.backend,
        "SUITE_MPIEXEC": asked.mpiexec,
        "WORLD_SIZE": str(asked.ranks),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/meet",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(asked.timeout),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, OURS), os.environ.get("PYTHONPATH", "")]),
    }


if __name__ == "__main__":
    sys.exit(main())

# --- what pytest collects in this file: torch's tests, under the variables above ---

import torch  # noqa: E402

import samestep  # noqa: E402, F401  (registers the backends)

with mock.patch("torch.distributed.is_mpi_available", return_value=True):  # there is one now, which torch does not say
    from torch.testing._internal.distributed import distributed_test


class AsGloo(str):
    """A backend's name that tests take for "gloo" too, where they ask what they have to do."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __hash__(self) -> int:
        return str.__hash__(self)


BACKEND = os.environ["SUITE_BACKEND"]
if BACKEND != distributed_test.BACKEND:
    distributed_test.BACKEND = AsGloo(BACKEND)  # what may run, torch has decided by now
if int(os.environ["WORLD_SIZE"]) < 3:
    os.environ["BACKEND"] = "gloo"  # for mpi torch would run tests of ranks 1 and 2 all the same

NOT_OF = {"gloo": (), "mpi": ("monitored_barrier", "sparse_all_reduce")}  # samestep adds sparse tensors up, MPI none


class TestDistributed(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # noqa: SLF001
    """Torch's tests, each in forked processes, or all in those that mpiexec has started."""

    def setUp(self) -> None:
        """Starts the ranks."""
        for other in NOT_OF.get(BACKEND, ("monitored_barrier",)):
            if other in self._testMethodName:
                self.skipTest(f"{other} asks for gloo by name")
        super().setUp()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)
        self._start_processes(Turn if BACKEND == "mpi" else torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def tearDownClass(cls) -> None:
        """Lets the ranks end, if they are mpiexec's."""
        super().tearDownClass()
        if Job.current is not None:
            Job.current.end_well()


# --- over MPI: ranks that mpiexec starts once; a new set of them after a test that failed ---

TIMEOUT_S = int(os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"])
FAILED = TestDistributed.TEST_ERROR_EXIT_CODE


class Job:
    """The ranks that one mpiexec has started, and a line to each."""

    current: Job | None = None

    def __init__(self) -> None:
        count, place = int(os.environ["WORLD_SIZE"]), f"{tempfile.mkdtemp(dir=Path.cwd())}/meet"
        command = [*shlex.split(os.environ["SUITE_MPIEXEC"]), "-n", str(count)]
        with socket.create_server(place, family=socket.AF_UNIX) as server:
            server.settimeout(1)
            self._process = subprocess.Popen([*command, sys.executable, "-c", SERVE, place])
            self.lines: dict[int, Connection] = {}
            while len(self.lines) < count:
                self._meet_one(server)

    def _meet_one(self, server: socket.socket) -> None:
        try:
            line: Connection = Connection(server.accept()[0].detach())
        except TimeoutError:
            if self._process.poll() is not None:
                raise RuntimeError(f"mpiexec has ended with {self._process.returncode}") from None
        else:
            self.lines[line.recv()] = line

    def end_well(self) -> None:
        """Tells the ranks to end, which they must do by themselves and without complaint."""
        Job.current = None
        for line in self.lines.values():
            line.close()
        code = self._process.wait(TIMEOUT_S)
        if code:
            raise RuntimeError(f"the ranks have passed their tests, and mpiexec ended with {code}")

    def end_now(self) -> None:
        """Ends ranks that may wait for each other."""
        Job.current = None
        self._process.terminate()
        self._process.wait(TIMEOUT_S)


SERVE = "import sys, torch_suite; torch_suite.serve(sys.argv[1])"


class Turn:
    """What torch takes for a process that does one test and ends: a rank of the job does the test, and stays."""

    def __init__(self, args: tuple[int, str, str, Connection], **_: object) -> None:
        self.pid, self._test, self._file, self._pipe = args  # the rank: any number that is its own
        self._code: int | None = None

    def start(self) -> None:
        """Asks the rank to do the test."""
        self._job = Job.current = Job.current or Job()
        try:
            self._job.lines[self.pid].send((self._test, self._file, os.environ["TEMP_DIR"]))
        except BrokenPipeError:
            self._job.end_now()
            raise

    @property
    def exitcode(self) -> int | None:
        """None while the rank has not answered."""
        line = self._job.lines[self.pid]
        if self._code is None and line.poll():
            try:
                self._code, told = line.recv()
            except EOFError:
                self._code, told = FAILED, "the rank has ended"
            if self._code == FAILED and not self._pipe.closed:
                with contextlib.suppress(BrokenPipeError):  # another rank's failure was enough
                    self._pipe.send(told)
        return self._code

    def terminate(self) -> None:
        """Ends the whole job unless all is well: who has left a test early, the others may wait for."""
        if self.exitcode in (None, FAILED) and Job.current is self._job:
            self._job.end_now()


def serve(place: str) -> None:
    """Does tests in this process, a rank of MPI, until no more are asked for."""
    from samestep.runtime.mpi.library import started_by

    started = started_by()
    assert started is not None
    rank = started[1]
    os.environ["RANK"] = str(rank)  # beside the WORLD_SIZE that torch's tests read
    with Client(place) as line:
        line.send(rank)
        with contextlib.suppress(EOFError):
            while True:
                test, file, os.environ["TEMP_DIR"] = line.recv()
                line.send(done(rank, test, file))


def done(rank: int, test: str, file: str) -> tuple[int, str]:
    """Does one test; returns what would have been the exit code of a process of its own, and how it failed."""
    mine, theirs = torch.multiprocessing.Pipe()
    distributed_test.Barrier.barrier_id = 0
    faulthandler.dump_traceback_later(TIMEOUT_S - 2)
    try:
        TestDistributed._run(rank, test, file, theirs)  # type: ignore[no-untyped-call]  # noqa: SLF001
    except SystemExit as left:
        code = int(left.code or 0)
        if code == FAILED:
            return code, mine.recv()
    except Exception:  # noqa: BLE001  (torch's harness raises it again)
        return FAILED, traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    if torch.distributed.is_initialized():  # a test that skips itself leaves it
        torch.distributed.destroy_process_group()
    return code, ""
