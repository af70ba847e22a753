"""How a job over MPI ends: with the culprit's own exit code and words, never by waiting for the dead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
from mpi_jobs import DEBIANS, MPIEXEC, WHEELS, mpiexec

from samestep.cli import main
from samestep.errors import BackendError
from samestep.runtime.mpi import library

BEGIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
import samestep
dist.init_process_group("mpi")
rank = dist.get_rank()
x = torch.ones(3)
dist.all_reduce(x)
"""
MORE = [pytest.param(name, marks=pytest.mark.prove) for name in WHEELS]
LEFT = """
from samestep.runtime.mpi.shutdown import shutdown_protocol
from samestep.runtime.mpi.library import load
def until_left(other):
    protocol = shutdown_protocol(load())
    while other not in protocol._left:
        protocol._receive()
"""
KILLED = 9  # mpiexec.hydra's own, for ranks that it has killed itself
LIBRARIES = ["mpich", pytest.param("openmpi", marks=pytest.mark.prove), *MORE]


def job(folder, library, text, count=2, *before, begin=BEGIN, **extra):
    (folder / "train.py").write_text(begin + textwrap.dedent(text))
    return mpiexec(library, count, *before, sys.executable, "train.py", folder=folder, timeout=60, **extra)


ENDS = {
    "sys.exit(7)": ("sys.exit(7)", 7, "rank 1 has ended, and this rank waits for it in barrier"),
    "an exception": ("raise ValueError('alone')", 1, "ValueError: alone"),
    "an early end with 0": ("sys.exit(0)", 1, "rank 1 has ended while others waited for it"),
    "os._exit": ("os._exit(3)", 3, ""),
}


PROVE = pytest.mark.prove
ENDINGS = [
    ("mpich", "an early end with 0"),
    *(pytest.param("mpich", end, marks=PROVE) for end in ("an exception", "sys.exit(7)", "os._exit")),
    ("openmpi", "an exception"),
    ("openmpi", "an early end with 0"),
    *(pytest.param("openmpi", end, marks=PROVE) for end in ("sys.exit(7)", "os._exit")),
    *(pytest.param(name, end, marks=PROVE) for name in WHEELS for end in ENDS),
]


@pytest.mark.parametrize(("mpi", "end"), ENDINGS)
def test_a_failing_rank_ends_the_job_with_its_own_code(mpi, end, tmp_path):
    act, code, said = ENDS[end]
    text = f"if rank == 1:\n    {act}\ndist.barrier()"
    forked = mpi != "mpich"  # whose mpiexec does not always hear of a fork that fails
    done = job(tmp_path, mpi, text, forked=forked)
    if mpi == "mpich" and done.returncode == KILLED:  # once in some thousand jobs on a busy machine: docs/mpi.md
        done = job(tmp_path, mpi, text, forked=forked)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("mpi", LIBRARIES)
def test_a_rank_that_waits_for_a_message_of_one_that_has_ended_is_freed(mpi, tmp_path):
    begin = f"{BEGIN}from samestep.runtime.mpi import shutdown\nshutdown.GRACE_S = 2.0\n"
    done = job(tmp_path, mpi, "if rank == 1:\n    sys.exit(9)\ndist.recv(x, 1)", begin=begin)
    assert done.returncode == 9, done.stderr
    assert "rank 1 has ended, and this rank waits for it in recv" in done.stderr


@pytest.mark.prove
def test_waiting_inside_mpi_is_freed_too(tmp_path):
    text = """
        group = dist.new_group(pg_options={"waiting": "blocking"})
        if rank == 1:
            sys.exit(7)
        dist.all_reduce(x, group=group)
    """
    done = job(tmp_path, "mpich", text, forked=False)
    assert done.returncode == 7, done.stderr
    assert "rank 1 has ended, and this rank waits for it in all_reduce" in done.stderr


@pytest.mark.parametrize("mpi", LIBRARIES)
def test_a_killed_rank_ends_the_job(mpi, tmp_path):
    done = job(tmp_path, mpi, "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert done.returncode in {9, 128 + 9}


@pytest.mark.parametrize("mpi", LIBRARIES)
def test_a_rank_that_is_done_early_waits_for_those_that_still_work(mpi, tmp_path):
    done = job(tmp_path, mpi, f"{LEFT}if rank == 0:\n    until_left(1)\n    print('worked on')")
    assert done.returncode == 0, done.stderr
    assert "worked on" in done.stdout


def test_a_root_may_leave_when_the_others_have_yet_to_receive(tmp_path):
    late = f"{LEFT}if rank == 1:\n    until_left(0)\ndist.broadcast(x, 0)\nprint('got', x[0].item())"
    done = job(tmp_path, "mpich", late)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("got 2.0") == 2


@pytest.mark.prove
def test_under_samestep_run_the_culprit_is_named(tmp_path):
    words = (sys.executable, "-P", "-m", "samestep", "run")
    (tmp_path / "train.py").write_text(f"{BEGIN}if rank == 1:\n    sys.exit(7)\ndist.barrier()\n")
    done = mpiexec("mpich", 2, *words, "train.py", folder=tmp_path)
    assert done.returncode == 7, done.stderr
    assert "rank 1 of 2 failed: exit code 7" in done.stderr


# --- what is missing or does not fit ---


def alone(folder, **extra):
    (folder / "train.py").write_text(BEGIN)
    words = [sys.executable, "-P", "-m", "samestep", "run", "-n", "2", "train.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "MPI", "OMPI"))}
    return subprocess.run(
        words, cwd=folder, env={**environment, **extra}, capture_output=True, text=True, timeout=60, check=False
    )


def test_ranks_that_no_mpiexec_has_started_are_told_how(tmp_path):
    done = alone(tmp_path)
    assert done.returncode == 2
    assert (
        "needs its ranks to be started by mpiexec or srun, and these 2 were not: `samestep run --mpi -n 2 "
        in done.stderr
    )


@pytest.fixture
def second_of_two(monkeypatch):
    """This process as rank 1 of an mpiexec's two."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)


def test_several_ranks_in_one_task_are_told_how(second_of_two):
    with pytest.raises(BackendError, match="mpiexec has started 2 processes, and this is rank 3 of 4") as refused:
        library.load(3, 4)
    assert "with `samestep run --mpi -n 4 SCRIPT`" in str(refused.value)
    with pytest.raises(BackendError, match="and this is rank 0 of 2"):
        library.load(0, 2)


def test_ranks_that_could_be_started_once_only_are_not_started_again(second_of_two, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(BackendError, match="MPI cannot begin twice under one mpiexec"):
        library.load(1, 2)
    assert main(["run", "--mpi", "-n", "2", "--restarts", "2", __file__]) == 2
    assert "--restarts does not go with --mpi" in capsys.readouterr().err


@pytest.mark.parametrize("mpi", LIBRARIES)
def test_who_waits_too_long_says_in_what_and_ends_the_job(mpi, tmp_path):
    text = """
        from datetime import timedelta
        groups = {way: dist.new_group(timeout=timedelta(seconds=0.5), pg_options={"waiting": way}) for way in MODES}
        if rank == 0:
            for way, group in groups.items():
                for act in (lambda: dist.barrier(group=group), lambda: dist.recv(x, 1, group=group)):
                    try:
                        act()
                    except Exception as error:
                        print(way, error, flush=True)
                        last = error
            raise last
        signal.pause()
    """
    begin = f"from samestep.runtime.mpi.operations import MODES\n{BEGIN}"
    done = job(tmp_path, mpi, text, begin=begin, forked=False)
    assert done.returncode != 0
    assert re.search(r"PeerError: waited \d\.\d s in recv", done.stderr)
    said = done.stdout
    for what in (r"barrier \(call 1 of this group\) for the other ranks", "recv for rank 1"):
        told = dict(re.findall(rf"^(\w+) waited (\d+\.\d) s in {what}; the timeout is over$", said, re.MULTILINE))
        assert told.keys() == {"polling", "blocking"}, said
        assert all(float(seconds) >= 0.5 for seconds in told.values())


def test_a_message_to_nobody_and_an_unknown_option_are_refused(tmp_path):
    text = """
        for act in (lambda: dist.send(x, 5), lambda: dist.recv(x, 5)):
            try:
                act()
            except Exception as error:
                print(type(error).__name__, error, flush=True)
        dist.barrier()  # mpiexec ends the other rank when one fails
        dist.destroy_process_group()
        dist.init_process_group("mpi", pg_options={"waiting": "nonsense"})
    """
    done = job(tmp_path, "mpich", text)
    assert done.returncode != 0
    assert done.stdout.count("UsageError there is no rank 5 in a group of 2") == 4
    assert "UsageError: the backend mpi has one option, 'waiting', which is 'blocking' or 'polling'" in done.stderr


def test_options_of_the_default_group_are_heard(tmp_path):
    begin = BEGIN.replace('"mpi")', '"mpi", pg_options={"waiting": "blocking"})')
    done = job(tmp_path, "mpich", "print('blocking', dist.group.WORLD._blocking)", begin=begin)
    assert done.stdout.count("blocking True") == 2, done.stderr


def test_a_missing_library_is_one_line(tmp_path):
    done = job(tmp_path, "mpich", "", MPI4PY_LIBMPI="/nowhere/libmpi.so.12", MPI4PY_MPIABI="")
    assert done.returncode == 1
    assert "BackendError: mpi4py finds no MPI library (cannot load MPI library): MPI4PY_LIBMPI names /no" in done.stderr


def test_a_library_that_does_not_hear_this_mpiexec_is_named(tmp_path):
    if DEBIANS is None or not MPIEXEC.exists():
        pytest.skip("needs two MPIs: pip install mpich, apt-get install openmpi-bin")
    done = job(tmp_path, "mpich", "", MPI4PY_LIBMPI="libmpi.so.40")
    assert done.returncode == 1
    assert "mpi4py has loaded Open MPI v4.1.4" in done.stderr
    assert "knows of 1 process and not of 2: mpiexec is one of MPICH or Intel MPI" in done.stderr


def test_a_missing_mpi4py_is_one_line(tmp_path):
    hidden = "import sys; sys.modules['mpi4py'] = None\nimport importlib.util as u; find = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *more: None if name == 'mpi4py' else find(name, *more)\n"
    done = job(tmp_path, "mpich", "", begin=hidden + BEGIN)
    assert done.returncode == 1
    assert "BackendError: backend 'mpi' needs mpi4py: pip install 'samestep[mpi]'" in done.stderr


def test_binding_that_starves_torch_is_said_with_what_fixes_it(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    (tmp_path / "train.py").write_text(BEGIN)
    done = mpiexec("bound", 1, sys.executable, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "UserWarning: the only rank of this host is bound to a single core" in done.stderr
    assert "start them with `mpiexec --bind-to none`, or `mpiexec --map-by slot:PE=" in done.stderr


# --- beyond what MPI counts ---

LONG = """
elements = (1 << 31) + 1001  # bytes
x = torch.full((elements,), rank + 1, dtype=torch.uint8)
dist.all_reduce(x)
assert bool((x == 3).all())
x.fill_(rank + 1)
dist.broadcast(x, 1)
assert bool((x == 2).all())
x.fill_(rank + 7)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
assert bool((x == 7).all())
half = x[: elements // 2 + 1].fill_(rank + 1)
rows = [torch.zeros_like(half) for _ in range(2)]
dist.all_gather(rows, half)
assert bool((rows[0] == 1).all()) and bool((rows[1] == 2).all())
print("long")
"""


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_tensors_of_more_than_two_gibibytes(mpi, tmp_path):
    (tmp_path / "train.py").write_text(BEGIN + LONG)
    done = mpiexec(mpi, 2, sys.executable, "train.py", folder=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["long"] * 2
