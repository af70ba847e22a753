import mmap
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from samestep.collectives import counters as module
from samestep.collectives.counters import DONE, READY, SharedCounters
from samestep.collectives.segments import Segment, open_segment, process_alive
from samestep.errors import PeerError

ALONE = 3600.0


def file_of(descriptor):
    """What a descriptor leads to: a path, with " (deleted)" behind it where no name leads there any more."""
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def counters(ranks, timeout_s=10.0, names=None):
    """Those of several ranks, all in this process."""
    memory = mmap.mmap(-1, module.length(ranks))
    return [
        SharedCounters(memory, rank, names or range(ranks), [os.getpid()] * ranks, timeout_s) for rank in range(ranks)
    ]


def test_a_rank_sees_how_far_the_others_are():
    first, second, third = counters(3)
    second.publish(READY, 5)
    assert not first.all_reached(READY, 5)
    third.publish(READY, 7)
    assert first.all_reached(READY, 5)
    assert not first.all_reached(READY, 6)
    assert not first.all_reached(DONE, 1)
    first.wait(READY, 5)


def test_a_counter_begins_again_after_its_last_number():
    first, second = counters(2)
    second.publish(READY, 2**32 - 1)
    assert first.all_reached(READY, 2**32 - 1)
    assert not first.all_reached(READY, 2**32)
    second.publish(READY, 2**32 + 1)
    assert first.all_reached(READY, 2**32)
    assert first.all_reached(READY, 2**32 - 5)


def test_a_sleeping_rank_is_woken_by_the_one_it_waits_for(monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT", struct.pack("=qq", 600, 0))  # nothing but being woken ends this sleep
    first, second = counters(2, timeout_s=ALONE)
    asleep = threading.Event()
    sleep = first._sleep
    first._sleep = lambda *about: (asleep.set(), sleep(*about))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.wait, READY, 1)
        assert asleep.wait(10)
        second.publish(READY, 1)
        waiting.result(timeout=10)


def test_every_rank_gets_the_numbers_of_all_again_and_again():
    every = counters(4)

    def talk(mine):
        return [mine.exchange(10 * turn + mine.rank, -turn) for turn in range(50)]

    with ThreadPoolExecutor() as pool:
        told = list(pool.map(talk, every))
    assert told == [[[(10 * turn + rank, -turn) for rank in range(4)] for turn in range(50)]] * 4


def test_a_rank_that_is_gone_is_named_long_before_the_timeout():
    child = os.fork()
    if child == 0:
        os._exit(0)
    memory = mmap.mmap(-1, module.length(2))
    first = SharedCounters(memory, 0, [4, 7], [os.getpid(), child], ALONE)
    with pytest.raises(PeerError, match=rf"rank 7 \(process {child}\) has left, and rank 4 waited to add gradients"):
        first.wait(READY, 1)  # dead, and nobody has waited for it yet
    os.waitpid(child, 0)
    with pytest.raises(PeerError, match="has left"):
        first.wait(READY, 1)


def test_a_rank_that_leaves_is_named_while_its_process_lives_on():
    first, second = counters(2, timeout_s=ALONE)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.wait, DONE, 1)
        second.close()
        with pytest.raises(PeerError, match="rank 1 .* has left"):
            waiting.result(timeout=10)


def test_what_a_rank_did_before_it_left_counts():
    first, second = counters(2)
    second.publish(READY, 3)
    second.close()
    first.wait(READY, 3)


def test_a_rank_that_does_not_come_is_named_with_the_wait():
    first, _ = counters(2, timeout_s=0.2)
    with pytest.raises(PeerError, match=r"rank 0 waited 0 s to add gradients with rank 1 \(process \d+\)"):
        first.wait(READY, 1)


def test_memory_of_another_process_is_opened_and_has_no_name():
    own = Segment(4096)
    _, descriptor = own.place
    assert file_of(descriptor).startswith("/memfd:")  # in no file system, where a name would outlive its process
    child = os.fork()
    if child == 0:
        found = open_segment(*own.place, 4096)
        assert found is not None
        found[:5] = b"hello"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert own.map[:5] == b"hello"
    own.close()
    assert open_segment(*own.place, 4096) is None


def test_memory_that_cannot_be_opened_is_none():
    assert open_segment(os.getpid(), 987654, 4096) is None
    own = Segment(10)
    assert open_segment(*own.place, 4096) is None
    own.close()


def test_a_process_that_has_ended_does_not_run_though_nobody_has_waited_for_it():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not process_alive(child)
    assert process_alive(os.getpid())
    os.waitpid(child, 0)
