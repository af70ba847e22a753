"""One process does the work, the others wait for it; one that dies at it is followed by the next."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import samestep
from samestep.errors import SamestepError, UsageError

WORKER = """
    import os, sys
    from samestep.data.once import once
    target, log, way = sys.argv[1:]
    with once(target) as mine:
        if mine:
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\\n")
            print("working", flush=True)
            sys.stdin.readline()
            if way == "raise":
                raise RuntimeError("the download broke off")
            os.mkdir(target)
    print("mine" if mine else "waited", os.path.isdir(target), flush=True)
"""


def start(target, log, way="finish", stdin=subprocess.PIPE):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER), str(target), str(log), way],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate("go\n" if process.stdin else None, timeout=60)
    assert process.returncode == 0, err
    return out.splitlines()[-1]


@pytest.fixture
def target(tmp_path):
    return tmp_path / "data" / "cifar"


def test_the_first_gets_the_work_and_later_ones_find_it_done(target):
    with samestep.once(target) as mine:
        assert mine
        target.mkdir()
    for _ in range(2):
        with samestep.once(target) as mine:
            assert not mine


def test_of_unrelated_processes_at_once_exactly_one_works_and_all_go_on_after_it(target, tmp_path):
    log = tmp_path / "log"
    processes = [start(target, log, stdin=subprocess.DEVNULL) for _ in range(4)]
    ends = sorted(finish(process) for process in processes)
    assert ends == ["mine True", "waited True", "waited True", "waited True"]
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize("way", ["kill", "raise"])
def test_the_next_takes_over_from_one_that_dies_at_it(target, tmp_path, way):
    log = tmp_path / "log"
    first = start(target, log, way)
    assert first.stdout.readline() == "working\n"
    second = start(target, log)
    if way == "kill":
        first.kill()
        first.communicate()
    else:
        _, err = first.communicate("go\n")
        assert "the download broke off" in err
    assert first.returncode != 0
    assert finish(second) == "mine True"
    assert log.read_text().split() == [str(first.pid), str(second.pid)]
    assert finish(start(target, log)) == "waited True"


def test_an_exception_passes_through_and_the_work_counts_as_not_done(target):
    with pytest.raises(ZeroDivisionError), samestep.once(target):
        1 / 0  # noqa: B018
    with samestep.once(target) as mine:
        assert mine


def test_a_wait_that_is_too_long_names_the_holder_and_the_wait(target, tmp_path):
    holder = start(target, tmp_path / "log")
    assert holder.stdout.readline() == "working\n"
    with pytest.raises(SamestepError, match=rf"waited 0\.\d s for pid {holder.pid} on .* to finish {target}; .*end it"):
        samestep.once(target, timeout=0.2).__enter__()
    assert finish(holder) == "mine True"
    with samestep.once(target, timeout=0) as mine:
        assert not mine


def test_threads_of_one_process_are_told_apart(target):
    begun, results = threading.Event(), []

    def ask():
        begun.set()
        with samestep.once(target) as mine:
            results.append(mine)

    with samestep.once(target) as mine:
        other = threading.Thread(target=ask)
        other.start()
        begun.wait()
        results.append(mine)
    other.join()
    assert results == [True, False]


def test_work_whose_result_was_deleted_is_done_again(target):
    with samestep.once(target):
        target.mkdir()
    target.rmdir()
    with samestep.once(target) as mine:
        assert mine
        target.mkdir()
    with samestep.once(target) as mine:
        assert not mine


def test_work_that_leaves_nothing_at_the_path_is_done_once_all_the_same(target):
    with samestep.once(target) as mine:
        assert mine
    with samestep.once(target) as mine:
        assert not mine


def test_deleting_the_marker_has_the_work_done_again(target):
    with samestep.once(target):
        target.mkdir()
    (target.parent / ".cifar.once-done").unlink()
    with samestep.once(target) as mine:
        assert mine


def test_a_torn_marker_does_not_count(target):
    target.mkdir(parents=True)
    (target.parent / ".cifar.once-done").write_text('{"made": tr')
    with samestep.once(target) as mine:
        assert mine


def on_a_rank(path):
    with samestep.world(device="cpu") as world, samestep.once(path) as mine:
        if mine:
            Path(path).mkdir()
        return mine, Path(path).is_dir(), world.size


def test_of_the_ranks_of_a_run_one_works(target, two_ranks):
    target.parent.mkdir()
    results = two_ranks(on_a_rank, str(target))
    assert sorted(mine for mine, _, _ in results) == [False, True]
    assert all(there and size == 2 for _, there, size in results)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_wait_that_is_no_time_is_refused(target, timeout):
    with pytest.raises(UsageError, match="at least 0"), samestep.once(target, timeout=timeout):
        pass


@pytest.mark.parametrize("path", ["", ".", "..", "/"])
def test_a_path_without_a_name_is_refused(path):
    with pytest.raises(UsageError, match="needs the path"), samestep.once(path):
        pass


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SamestepError, match=f"cannot take turns at {tmp_path}/file/data"),
        samestep.once(tmp_path / "file" / "data"),
    ):
        pass
