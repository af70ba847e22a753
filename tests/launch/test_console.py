"""Lines of several ranks on one terminal."""

from __future__ import annotations

import os
import pty

import pytest

from samestep.launch.output.console import NonBlockingWriter, RankStream
from samestep.launch.output.lines import LineMerger


@pytest.fixture
def channel(tmp_path):
    """Makes a channel of rank 1; returns it, what shows what the screen got, and its file."""
    shown, screen = os.pipe()

    def make(folder=None):
        log = (tmp_path / "log").open("wb", buffering=0)
        return RankStream(1, NonBlockingWriter(screen), folder, log), lambda: os.read(shown, 1 << 20), tmp_path / "log"

    yield make
    os.close(shown)
    os.close(screen)


def test_lines_are_taken_whole_and_kept_as_they_came(channel):
    folder = LineMerger(2)
    rank1, _, log = channel(folder)
    rank1.feed(b"one\ntw")
    assert folder.take(0.0, everything=True) == [b"[rank 1] one"]
    rank1.feed(b"o\nthree")
    assert folder.take(0.0, everything=True) == [b"[rank 1] two"]
    rank1.close()
    assert folder.take(0.0, everything=True) == [b"[rank 1] three"]
    assert log.read_bytes() == b"one\ntwo\nthree"


def test_what_a_progress_bar_overwrote_is_not_shown_but_kept(channel):
    folder = LineMerger(2)
    rank1, _, log = channel(folder)
    rank1.feed(b"10 %\r50 %\r100 %\r\n")
    rank1.close()
    assert folder.take(0.0, everything=True) == [b"[rank 1] 100 %"]
    assert log.read_bytes() == b"10 %\r50 %\r100 %\r\n"


def test_a_single_ranks_bytes_are_not_touched(channel):
    rank1, shown, _ = channel()
    rank1.feed(b"\x1b[2K 50 %\r\xff")
    rank1.close()
    assert shown() == b"\x1b[2K 50 %\r\xff"


def test_a_line_starts_on_a_line_of_its_own():
    shown, descriptor = os.pipe()
    screen = NonBlockingWriter(descriptor)
    screen.show(b"drawing")
    screen.show_line(b"[rank 1] a line")
    assert os.read(shown, 100) == b"drawing\n[rank 1] a line\n"
    os.close(shown)
    os.close(descriptor)


def test_a_terminal_gets_its_cursor_back():
    shown, descriptor = os.pipe()
    screen = NonBlockingWriter(descriptor)
    screen.show(b"\x1b[?25l 50 %")
    screen.restore_terminal()
    screen.restore_terminal()
    assert os.read(shown, 100) == b"\x1b[?25l 50 %\n\x1b[?25h"
    os.close(shown)
    os.close(descriptor)


def test_a_reader_that_left_does_not_end_the_run(folder):
    script = folder.script("for i in range(20000): print('x' * 100)\nopen('finished', 'w')")
    read, write = os.pipe()
    process = folder.start(script, stdout=write)
    os.close(write)
    os.read(read, 10)
    os.close(read)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (folder.path / "finished").exists()
    note = "samestep: note: nobody reads standard output any more; the run goes on, its output is in runs/train-"
    assert said.count(note) == 1


def test_rank_zero_draws_on_a_terminal_and_the_others_do_not(folder):
    script = folder.script("""
        print(rank, sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1) if rank == 0 else "")
    """)
    master, slave = pty.openpty()
    process = folder.start("-n", 2, script, stdout=slave)
    os.close(slave)
    process.communicate(timeout=60)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "0 True False os.terminal_size(columns=0, lines=0)\r\n" in shown
    assert "[rank 1] 1 False False \r\n" in shown
    assert folder.logs()["rank0.out"].startswith("0 True False")
    assert "\r" not in folder.logs()["rank0.out"]
