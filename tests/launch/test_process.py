"""Processes that have become another user's: the launcher may be forbidden to end them, and must not end for that."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_supervise import is_running, wait_until_gone

from samestep.launch.process import children, start, threads

PR_CAPBSET_DROP, CAP_KILL, NOBODY = 24, 5, 65534


def without_the_right_to_kill():
    """What a container's root often is. Takes effect at the exec that follows."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_KILL, 0, 0, 0)


def test_a_process_that_has_ended_has_no_threads_and_no_children(monkeypatch):
    """One that ends just behind a look whether it is there, too."""
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert (threads(ended.pid), children(ended.pid)) == ([], [])
    assert [int(thread.name) for thread in threads(os.getpid())].count(os.getpid()) == 1


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@needs_root
def test_a_rank_that_became_another_user_is_told_to_leave_and_does(folder):
    script = folder.script("""
        if rank == 0:
            os.setuid(65534)
            time.sleep(60)
        time.sleep(0.5)
        raise ValueError("alone")
    """)
    done = folder.run("-n", 2, "--start", "spawn", script, preexec_fn=without_the_right_to_kill)
    assert (done.returncode, folder.result["failure"]["exception"]) == (1, "ValueError"), done.stderr


@needs_root
def test_what_a_rank_left_to_another_user_does_not_end_the_launcher(folder):
    script = folder.script("""
        if rank == 0:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.setsid()
                os.setuid(65534)
                os.write(writer, b"x")
                signal.pause()
                os._exit(0)
            os.read(reader, 1)
            print(child)
        print("trained")
    """)
    done = folder.run("-n", 2, "--start", "spawn", script, preexec_fn=without_the_right_to_kill)
    left = int(
        next(word for line in done.stdout.splitlines() for word in line.split() if word.isdigit() and len(word) > 2)
    )
    try:
        assert done.returncode == 0, done.stderr
        assert is_running(left)
    finally:
        os.kill(left, signal.SIGKILL)
    wait_until_gone([left])


NAMES = """
import os, subprocess, sys
from samestep.launch.process import become_subreaper, children, kill_orphans
become_subreaper()
other = subprocess.Popen(["sleep", "600"], user=65534, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
own = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
kill_orphans()
print(children(os.getpid()) == [other.pid], other.pid)
"""


@needs_root
def test_those_that_may_not_be_ended_are_left_out():
    command = [sys.executable, "-c", NAMES]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=without_the_right_to_kill
    )
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout.split()[1])
    os.kill(pid, signal.SIGKILL)
    assert done.stdout == f"True {pid}\n"


def test_a_process_has_a_state_even_if_its_name_is_no_utf8(tmp_path):
    from samestep.launch.process import stat_of

    odd = tmp_path / "caf\udce9"
    odd.symlink_to("/bin/sleep")
    process = start([str(odd), "600"], dict(os.environ))
    while Path(f"/proc/{process.pid}/comm").read_bytes().startswith(b"python"):
        os.sched_yield()
    try:
        assert stat_of(process.pid)[0] in "RSD"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
