"""Runs whose ranks call each other with torch.distributed.rpc: who is to blame, and who holds a run up."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from samestep import progress
from samestep.instrument.rpc import _leave_last
from samestep.launch.monitor.hang import describe_hang, diagnose
from samestep.launch.monitor.heartbeat import RankHeartbeat
from samestep.launch.rank.failure import describe, lost_peer
from samestep.launch.rank.user_code import SERVED, place_in
from samestep.launch.result import decide, summary_lines
from samestep.progress import SHUTDOWN

SCRIPT = """
    import os, signal, sys, threading
    import torch
    from torch.distributed import rpc

    rank, size, fault = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]

    def raises():
        raise ValueError("no such row")

    def killed():
        os.kill(os.getpid(), signal.SIGKILL)

    def stuck():
        threading.Event().wait()

    @rpc.functions.async_execution
    def unanswered():
        return torch.futures.Future()

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item() == 2
        rpc.rpc_sync("worker1", globals()[fault], timeout=0)
    rpc.shutdown()
"""
FAULTS = ("raises", "killed", "stuck", "unanswered")


def line_of(text: str) -> int:
    """Returns the number of the line of the script that holds a text."""
    lines = textwrap.dedent(SCRIPT).splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and standard error of each, all at once: most of their time they wait."""
    folder = tmp_path_factory.mktemp("rpc")
    (folder / "calls.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")

    def one(fault: str) -> tuple[int, str]:
        words = ["run", "-n", "3", "--hang-after", "1", "--on-hang", "stop", "--run-dir", fault, "calls.py", fault]
        done = subprocess.run(
            [sys.executable, "-m", "samestep", *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        return done.returncode, done.stderr

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(FAULTS, pool.map(one, FAULTS), strict=True))


def test_whoever_is_to_blame_is_named(runs: dict[str, tuple[int, str]]) -> None:
    code, said = runs["raises"]
    assert code == 1
    called = f"called at calls.py:{line_of('globals()[fault]')}"
    assert f"rank 0 of 3 failed: ValueError: no such row (on worker1, rank 1, {called})\n" in said
    assert f"    at calls.py:{line_of('raise ValueError')}  raise ValueError" in said
    code, said = runs["killed"]
    assert code == 137
    assert "rank 1 of 3 failed: it was killed by SIGKILL" in said
    assert f"rank 0 was at calls.py:{line_of('globals()[fault]')}" in said


def test_a_call_that_never_returns_is_explained(runs: dict[str, tuple[int, str]]) -> None:
    for fault, place in (("stuck", "threading.Event().wait()"), ("unanswered", "rpc.shutdown()")):
        code, said = runs[fault]
        assert code == 124, said
        assert re.search(rf"rank 1 has not returned from {fault}; rank 0 is waiting for it", said), said
        assert f"rank 0 waiting for {fault} on rank 1 at calls.py:{line_of('globals()[fault]')}" in said
        assert f"at calls.py:{line_of(place)}  {place}" in said
        assert ("rank 1: the function has returned a future that is not complete yet" in said) == (fault != "stuck")


REMOTE = """ValueError: On WorkerInfo(id=2, name=server):
ValueError('bad')
Traceback (most recent call last):
  File "/torch/distributed/rpc/internal.py", line 209, in _run_function
    result = python_udf.func(*python_udf.args, **python_udf.kwargs)
  File "{file}", line 3, in step
    raise ValueError("bad")
ValueError: bad


At:
  /torch/distributed/rpc/internal.py(236): _handle_exception
"""


@pytest.mark.parametrize("nested", [False, True])
def test_an_exception_of_a_called_function_has_its_own_place(tmp_path: Path, *, nested: bool) -> None:
    message = REMOTE.format(file=tmp_path / "server.py")
    if nested:  # the function has called another
        message = f"ValueError: On WorkerInfo(id=1, name=middle):\nValueError(…)\n{message}"
    failure = describe(ValueError(message), 0)
    assert (failure.exception, failure.message) == ("ValueError", "bad (on server, rank 2)")
    assert failure.where == f"{tmp_path}/server.py:3"


@pytest.mark.parametrize(
    "message",
    [
        "eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)",
        "pipe closed (this error originated at tensorpipe/core/pipe_impl.cc:356)",
        "RPCErr:1:RPC ran for more than set timeout (20000 ms) and will now be marked with an error",
    ],
)
def test_what_a_caller_is_told_of_another_rank_is_a_victims(message: str) -> None:
    with pytest.raises(RuntimeError) as raised:  # by native code, as the wait for a call does
        ctypes.pythonapi.PyErr_SetString(ctypes.py_object(RuntimeError), message.encode())
    assert lost_peer(raised.value)
    failure = replace(describe(raised.value, 0), lost_peer=True)
    (headline,) = [
        line for line in summary_lines(decide({0: 1, 1: -15}, [failure], {}, None), None) if "error:" in line
    ]
    assert ("waited for a call of torch.distributed.rpc for too long: RPC ran" in headline) == message.startswith(
        "RPCErr"
    )


IDLE = RankHeartbeat(
    rank=0,
    pid=70,
    step=0,
    since_progress=12.0,
    since_activity=12.0,
    state="S",
    entered=1,
    operation="",
    site="",
    phase="",
    p99_step=0.0,
)
CALLS = replace(IDLE, rank=1, call="f", callee=0, call_site="a.py:3")
SERVES = replace(IDLE, rank=2, call=SHUTDOWN)


def test_a_call_is_waited_for_longer_before_the_second_step() -> None:
    assert diagnose([IDLE, CALLS, SERVES]) is None
    found = diagnose([replace(each, since_progress=61.0) for each in (IDLE, CALLS, SERVES)])
    assert found is not None
    assert (found.kind, found.culprits, found.certain, found.early) == ("call", (0,), False, False)
    found = diagnose([replace(each, step=5) for each in (IDLE, CALLS, SERVES)])
    assert found is not None
    assert found.kind == "call"


def test_of_a_chain_of_calls_the_last_is_named() -> None:
    ranks = [replace(IDLE, step=5), replace(CALLS, step=5), replace(CALLS, rank=2, callee=1, step=5)]
    found = diagnose(ranks)
    assert found is not None
    assert found.culprits == (0,)
    ranks[0] = replace(ranks[0], callee=2, call="g")
    found = diagnose(ranks)
    assert found is not None
    assert found.culprits == (0, 1, 2)
    lines = describe_hang(found, dict(enumerate(ranks)), {})
    assert lines[0].endswith("ranks 0-2 have not returned from g and f")


def test_who_serves_calls_waits_for_nobody() -> None:
    computing = replace(IDLE, step=5, since_activity=0.1, state="R")
    assert diagnose([computing, replace(SERVES, step=5)]) is None


def test_the_line_of_a_served_call_is_that_of_its_thread() -> None:
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "served.py", line 3 in f\n'
        '  File "/torch/internal.py", line 9 in _run_function\n'
        'Current thread 0x2 (most recent call first):\n  File "main.py", line 5 in <module>\n'
    )
    assert place_in(stacks)[0] == "main.py:5"
    assert place_in(stacks, SERVED)[0] == "served.py:3"


def test_calls_are_noted_and_the_record_can_be_read_though_two_threads_wrote_at_once() -> None:
    descriptor = progress.create()
    record = progress.ProgressRecord(progress.mmap.mmap(descriptor, progress.SIZE))
    record.set_calls("f", 2, "a.py:1", "g")
    with record._writing(), record._writing():
        pass
    assert not record.fields.version % 2
    read = progress.read(descriptor)
    os.close(descriptor)
    assert (read.calls, read.call, read.callee, read.call_site, read.serving) == (1, "f", 2, "a.py:1", "g")
    assert str(read) == "waiting for f on rank 2, at a.py:1"


class Agent:
    """What is asked of the agent of a rank."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.store = store
        self.id = rank

    def get_worker_infos(self) -> list[int]:
        return [0, 1]

    def get_worker_info(self) -> Agent:
        return self


def test_rank_0_whose_store_the_others_ask_leaves_last() -> None:
    store = dist.HashStore()
    first = threading.Thread(target=_leave_last, args=[Agent(0, store)])
    first.start()
    first.join(0.2)
    assert first.is_alive()
    _leave_last(Agent(1, store))
    first.join(5)
    assert not first.is_alive()
