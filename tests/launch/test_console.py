"""Lines of several ranks on one terminal."""

from __future__ import annotations

import os
import pty

import pytest

from samestep.launch.console import Screen, open_channel


@pytest.fixture
def pipes(tmp_path):
    """A channel of rank 1, with the end that the rank writes to and the end that shows what the screen got."""
    source, sink = os.pipe()
    shown, screen = os.pipe()

    def make(*, prefixed):
        return open_channel(1, "out", source, Screen(screen), prefixed=prefixed, log=tmp_path / "log")

    yield make, sink, lambda: os.read(shown, 1 << 20), tmp_path / "log"
    os.close(shown)
    os.close(screen)


def test_lines_are_shown_whole_with_their_rank(pipes):
    make, sink, shown, log = pipes
    channel = make(prefixed=True)
    os.write(sink, b"one\ntw")
    assert channel.pump()
    assert shown() == b"[rank 1] one\n"
    os.write(sink, b"o\nthree")
    assert channel.pump()
    assert shown() == b"[rank 1] two\n"
    os.close(sink)
    assert not channel.pump()
    channel.close()
    assert shown() == b"[rank 1] three\n"
    assert log.read_bytes() == b"one\ntwo\nthree"


def test_what_a_progress_bar_overwrote_is_not_shown_but_kept(pipes):
    make, sink, shown, log = pipes
    channel = make(prefixed=True)
    os.write(sink, b"10 %\r50 %\r100 %\r\n")
    channel.pump()
    assert shown() == b"[rank 1] 100 %\n"
    os.close(sink)
    channel.close()
    assert log.read_bytes() == b"10 %\r50 %\r100 %\r\n"


def test_a_single_ranks_bytes_are_not_touched(pipes):
    make, sink, shown, _ = pipes
    channel = make(prefixed=False)
    os.write(sink, b"\x1b[2K 50 %\r\xff")
    channel.pump()
    assert shown() == b"\x1b[2K 50 %\r\xff"
    os.close(sink)
    channel.close()


def test_a_line_starts_on_a_line_of_its_own():
    shown, descriptor = os.pipe()
    screen = Screen(descriptor)
    screen.show(b"drawing")
    screen.show_line(b"[rank 1] a line")
    assert os.read(shown, 100) == b"drawing\n[rank 1] a line\n"
    os.close(shown)
    os.close(descriptor)


def test_a_terminal_gets_its_cursor_back():
    shown, descriptor = os.pipe()
    screen = Screen(descriptor)
    screen.show(b"\x1b[?25l 50 %")
    screen.tidy()
    screen.tidy()
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
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert (folder.path / "finished").exists()


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
