from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from samestep.data.once import Holder, NamedLock

HOLD = """
    import os, signal, sys
    from pathlib import Path
    from samestep.data.once import NamedLock
    lock = NamedLock(Path(sys.argv[1]))
    assert lock.acquire(0)
    if (child := os.fork()) == 0:
        signal.pause()
    print(child, flush=True)
    signal.pause()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.lock"


def test_a_lock_has_one_holder_at_a_time_and_names_it(path):
    first, second = NamedLock(path), NamedLock(path)
    assert first.acquire(0)
    assert not second.acquire(0)
    assert second.holder() == first.holder()
    assert second.holder().pid == os.getpid()
    assert second.holder().is_this_process
    first.release()
    assert second.acquire(0)
    second.release()
    assert second.holder() is None


def test_releasing_what_is_not_held_does_nothing(path):
    first, second = NamedLock(path), NamedLock(path)
    assert first.acquire(0)
    second.release()
    assert second.holder() is not None
    first.release()
    first.release()


def test_an_unreadable_note_names_nobody(path):
    path.with_name("a.lock.holder").write_text("{half")
    assert NamedLock(path).holder() is None


def test_a_killed_holder_leaves_the_lock_free_and_is_known_to_be_dead(path):
    code = textwrap.dedent(HOLD)
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        lock = NamedLock(path)
        assert not lock.acquire(0)
        holder = lock.holder()
        assert holder.pid == process.pid
        assert holder.may_live
        assert not holder.is_this_process
        process.kill()
        process.wait()
        assert not holder.may_live
        os.kill(child, signal.SIGKILL)  # where a forked child inherits the lock, it ends with the child
        assert lock.acquire(20)
        lock.release()


def test_a_holder_on_another_host_may_live():
    here = Holder.here()
    assert not replace(here, pid=2**22 + 1).may_live
    other = replace(here, where="another machine, of the same name")
    assert replace(other, pid=2**22 + 1).may_live
    assert not other.is_this_process
