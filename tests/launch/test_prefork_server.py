"""Ranks forked from a process that has imported torch: replaced at once, and gone when it is."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from samestep import testing
from samestep.errors import RankFailure
from samestep.testing import RankSet, ranks


def place():
    return os.getpid(), os.getppid()


def end_rank_one(code):
    if int(os.environ["RANK"]) == 1:
        os._exit(code)


def kill_rank_one():
    if int(os.environ["RANK"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def multiply():
    return float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())


@pytest.fixture(scope="module")
def two():
    with ranks(2) as run:
        yield run


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def assert_ended(handles):
    """Asserts that processes end, or have ended: the kernel takes a moment."""
    for handle in handles:
        assert select.select([handle], [], [], 20)[0]
        os.close(handle)


def test_a_set_that_failed_is_replaced_from_the_same_process(two):
    before = two(place)
    with pytest.raises(RankFailure):
        two(end_rank_one, 9)
    after = two(place)
    assert {parent for _, parent in before} == {parent for _, parent in after}
    assert len({parent for _, parent in after} | {os.getpid()}) == 2  # it is none of ours
    assert not {pid for pid, _ in before} & {pid for pid, _ in after}
    assert all(gone(pid) for pid, _ in before)


def test_an_exit_code_and_a_signal_of_somebody_elses_child_are_told(two):
    with pytest.raises(RankFailure, match="exited with code 9") as ended:
        two(end_rank_one, 9)
    assert (ended.value.rank, ended.value.exit_code) == (1, 9)
    with pytest.raises(RankFailure, match="SIGKILL") as killed:
        two(kill_rank_one)
    assert killed.value.rank == 1


def test_forked_ranks_compute(two):
    assert two(multiply) == [300.0**3] * 2


def test_a_killed_parent_takes_its_ranks_along_and_is_replaced_by_one_that_writes_where_this_process_does(two, capfd):
    (first, parent), (second, _) = two(place)
    handles = [os.pidfd_open(pid) for pid in (first, second, parent)]
    with pytest.raises(RankFailure):
        two(kill_parent)
    assert_ended(handles)
    assert {new for _, new in two(place)} != {parent}
    two(print, "from a rank")
    assert capfd.readouterr().out.count("from a rank") == 2


class NoForks:
    """Stands for a process that has started threads when it imported torch."""

    def __init__(self, variables):
        pass

    def why_unavailable(self):
        return "importing torch has started threads"

    def has_ended(self):
        return False

    def close(self):
        pass


@pytest.mark.prove
def test_where_nothing_can_be_forked_ranks_are_fresh_interpreters(monkeypatch):
    monkeypatch.setattr(testing, "PreforkServer", NoForks)
    run = RankSet(1)
    try:
        assert run(place)[0][1] == os.getpid()
    finally:
        run.close()


def test_where_nothing_can_be_forked_a_set_of_ranks_is_given_no_process_to_fork_them_from(monkeypatch):
    given = []
    pool = SimpleNamespace(call=lambda *_, **__: [1], close=lambda: None)
    monkeypatch.setattr(testing, "PreforkServer", NoForks)
    monkeypatch.setattr(testing, "RankPool", lambda size, **options: given.append((size, options["server"])) or pool)
    run = RankSet(1)
    assert run(place) == [1]
    run.close()
    assert given == [(1, None)]


def test_all_forked_processes_end_with_a_caller_that_is_killed(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        textwrap.dedent("""\
        import os, signal
        from samestep.testing import ranks

        def place():
            return os.getpid(), os.getppid()

        with ranks(2) as run:
            print(*sum(run(place), ()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    out = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=120, check=False).stdout
    assert_ended([os.pidfd_open(pid) for pid in map(int, out.split()) if not gone(pid)])
    assert len(out.split()) == 4


def test_a_copy_of_its_caller_that_lives_on_does_not_keep_it(two):
    two(place)
    nursery, two._fork_server = two._fork_server, None
    two.close()  # the ranks
    listening, held = os.pipe()
    copy = os.fork()  # as DataLoader forks its workers: with every descriptor
    if not copy:
        os.close(held)
        os.read(listening, 1)
        os._exit(0)
    try:
        nursery.close()
        assert nursery.has_ended()
        assert os.waitpid(copy, os.WNOHANG) == (0, 0)
    finally:
        os.close(held)
        os.waitpid(copy, 0)
        os.close(listening)
