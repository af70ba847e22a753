"""A rank's record: what is written is what is read, by whoever holds the memory, at any moment."""

import os
import threading

import pytest

from samestep import progress


def test_a_new_record_names_the_process_and_nothing_else(record):
    read = progress.read(record)
    assert read.process == os.getpid()
    assert (read.step, read.changed, read.phase, read.entered, read.left) == (0, None, "", 0, 0)
    assert str(read) == ""


def test_a_record_that_no_process_writes_yet_waits_for_no_call():
    descriptor = progress.create()
    assert progress.read(descriptor).callee == -1  # else a rank that starts slowly seems to hang, and gets a signal
    os.close(descriptor)


def test_steps_are_counted_until_somebody_tells_them(record):
    progress.count_step()
    progress.count_step()
    assert progress.read(record).step == 2
    progress.set_step(40)
    progress.count_step()
    read = progress.read(record)
    assert read.step == 40
    assert read.changed is not None


def test_a_phase_ends_where_it_began(record):
    progress.set_phase("train")
    with progress.phase("save"):
        read = progress.read(record)
        assert (read.phase, str(read)) == ("save", "saving")
        since = read.phase_since
    assert progress.read(record).phase == "train"
    assert progress.read(record).phase_since >= since
    with pytest.raises(KeyError), progress.phase("evaluate"):
        raise KeyError
    assert progress.read(record).phase == "train"


def test_a_collective_is_told_with_its_number_and_line_while_it_lasts(record):
    progress.enter_collective("all_reduce", "train.py:12")
    progress.exit_collective()
    assert not progress.read(record).in_collective
    progress.enter_collective("barrier", "train.py:40")
    read = progress.read(record)
    assert read.in_collective
    assert str(read) == "in barrier, its collective 2, at train.py:40"


def test_a_long_place_keeps_its_end(record):
    progress.enter_collective("x" * 50, "/a" * 400 + "/train.py:12")
    read = progress.read(record)
    assert len(read.site.encode()) == 400
    assert read.site.endswith("/train.py:12")
    assert read.operation == "x" * 32


def test_a_process_without_a_record_notes_nothing():
    progress.detach()
    progress.set_step(1)
    progress.enter_collective("barrier", "x:1")
    progress.exit_collective()
    assert progress.set_phase("save") == ""
    assert not progress.is_attached()


def test_a_record_in_a_file_is_read_by_its_path(tmp_path):
    progress.attach(progress.create_file(tmp_path / "rank3.progress"))
    try:
        progress.set_step(7)
        assert progress.read_file(tmp_path / "rank3.progress").step == 7
        assert (tmp_path / "rank3.progress").stat().st_mode & 0o777 == 0o600  # of its user alone, as all of a run
    finally:
        progress.detach()


def test_nobody_reads_half_of_what_is_being_written(record):
    """The two names are of different length, so that a mixture of both would show."""
    done, calls = threading.Event(), {"all_reduce": "a.py:1" * 40, "barrier": "barrier.py:22222"}

    def write():
        while not done.is_set():
            for operation, site in calls.items():
                progress.enter_collective(operation, site)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            read = progress.read(record)
            assert calls.get(read.operation, "") == read.site
            assert (read.entered % 2 == 1) == (read.operation == "all_reduce")
    finally:
        done.set()
        writer.join()


def test_the_version_is_odd_while_a_record_is_written(record):
    """A reader that sees an odd version reads again."""

    def version():
        return progress.Layout.from_buffer_copy(os.pread(record, 4096, 0)).version

    (writer,) = progress._listeners
    before = version()
    with writer._writing():
        assert version() == before + 1
    assert version() == before + 2
    assert before % 2 == 0


def test_a_place_whose_name_is_no_utf8_is_noted_all_the_same(record):
    progress.enter_collective("all_reduce", "/runs/\udcff/train.py:12")
    assert progress.read(record).site == r"/runs/\udcff/train.py:12"


def test_a_collective_within_the_wait_of_a_backward_pass_is_waited_for_once(record, monkeypatch):
    """Gradients are there at 10 s; a hook stands in an all-reduce until 14 s, and the pass ends at 15 s."""
    clock = [0]
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: clock[0] * 10**9)
    progress.set_phase("backward")
    for now, note in (
        (3, lambda: progress.enter_collective("all_reduce", "hook.py:1")),
        (5, progress.exit_collective),
        (10, progress.gradients_ready),
        (11, lambda: progress.enter_collective("all_reduce", "hook.py:1")),
        (14, progress.exit_collective),
        (15, progress.backward_done),
        (16, progress.count_step),
    ):
        clock[0] = now
        note()
    assert progress.read(record).waited == 2 + 5
