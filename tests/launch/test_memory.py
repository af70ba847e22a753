"""Whose death for want of memory is counted: that of this control group's processes, where the kernel tells."""

from __future__ import annotations

import pytest

from samestep.errors import UsageError
from samestep.launch import local_ranks
from samestep.launch.event_loop import Loop
from samestep.launch.local_ranks import Job, LocalRanks
from samestep.launch.rank import failure
from samestep.launch.rank.failure import death
from samestep.launch.resources import check_room, counts_own_kills, out_of_memory_kills, read_memory

MACHINE = {"proc/vmstat": "nr_free_pages 5\noom_kill 7\n"}
LEGACY = {
    "proc/self/cgroup": "4:memory:/job\n0::/\n",
    "proc/self/mountinfo": "33 24 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 40\n",
}
UNIFIED = {
    "proc/self/cgroup": "0::/user/job\n",
    "proc/self/mountinfo": "29 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/user/job/memory.events": "low 0\noom 3\noom_kill 3\n",
    "sys/fs/cgroup/user/memory.events": "oom_kill 50\n",
}


def lay(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(("files", "kills"), [(LEGACY, 2), (UNIFIED, 3)])
def test_the_own_groups_count_is_taken_and_nobody_elses(tmp_path, files, kills):
    root = lay(tmp_path, MACHINE | files)
    assert (out_of_memory_kills(root), counts_own_kills(root)) == (kills, True)


def test_the_machines_count_is_all_there_is_without_a_group(tmp_path):
    root = lay(tmp_path, MACHINE)
    assert (out_of_memory_kills(root), counts_own_kills(root)) == (7, False)
    assert out_of_memory_kills(tmp_path / "nothing") == 0


@pytest.mark.parametrize("own", [True, False])
def test_a_kill_somewhere_on_the_machine_is_not_said_to_be_the_ranks(monkeypatch, own):
    monkeypatch.setattr(failure, "counts_own_kills", lambda: own)
    message = death(1, 2, -9, of_memory=True).message
    assert ("the kernel killed it: out of memory" in message) == own
    assert ("meanwhile the kernel killed a process of this machine: out of memory" in message) != own


def test_what_the_kernel_killed_in_an_earlier_attempt_is_no_reason_for_a_later_end(monkeypatch):
    kills = [3]
    monkeypatch.setattr(local_ranks, "out_of_memory_kills", lambda: kills[0])
    ranks = LocalRanks(Loop(), lambda kind, payload=b"", **body: None)
    for killed in (True, False):
        ranks.start(Job(program="train.py", arguments=()), None)
        kills[0] += killed
        assert ranks._was_killed_for_memory(-9) == killed


def test_more_ranks_than_memory_are_refused(tmp_path):
    lay(tmp_path, {"proc/meminfo": "MemTotal: 2000000 kB\nMemFree: 1 kB\nMemAvailable: 1000000 kB\n"})
    check_room(30, tmp_path)
    with pytest.raises(UsageError, match=r"-n 5000 needs 146.8 GB of memory or more, and 1.0 GB are free"):
        check_room(5000, tmp_path)


@pytest.mark.parametrize(
    ("group", "files"),
    [
        (LEGACY, {"limit_in_bytes": "1000000000", "usage_in_bytes": "999000000", "stat": "total_{0}active_file {1}"}),
        (UNIFIED, {"max": "1000000000", "current": "999000000", "stat": "{0}active_file {1}"}),
    ],
)
def test_a_container_full_of_files_that_were_read_has_room(tmp_path, group, files):
    folder = "sys/fs/cgroup/memory/job" if group is LEGACY else "sys/fs/cgroup/user/job"
    kept = "\n".join(files["stat"].format(part, 400_000_000) for part in ("", "in"))
    told = {f"{folder}/memory.{name}": text for name, text in (files | {"stat": f"anon 5\n{kept}\n"}).items()}
    lay(tmp_path, group | told | {"proc/meminfo": "MemTotal: 9000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\n"})
    assert read_memory(tmp_path) == (801_000_000, 1_000_000_000)
    check_room(27, tmp_path)
