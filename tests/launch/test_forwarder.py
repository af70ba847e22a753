"""What ranks print and draw, on its way to the caller's own streams."""

from __future__ import annotations

import contextlib
import io
import os
import time

import pytest

from samestep.launch.functions.forwarder import OutputForwarder, StatusLine


class Ranks:
    """Stands for the ranks of an attendant: what they would write is written by the test."""

    def __init__(self, size, status=None, stream=None):
        self.stream = stream or io.StringIO()
        self.attendant = OutputForwarder(size, {1: self.stream}, status)
        self.sinks = {}
        for rank in range(size):
            with self.attendant.open_streams(rank) as (streams, _):
                self.sinks[rank] = os.dup(streams["stdout"])

    def say(self, rank, data):
        os.write(self.sinks[rank], data)
        self.attendant.wait([], time.monotonic())

    def end(self):
        while self.sinks:
            os.close(self.sinks.popitem()[1])
        self.attendant.close()
        return self.stream.getvalue()


@pytest.fixture
def ranks():
    with contextlib.ExitStack() as stack:

        def make(*args, **options):
            made = Ranks(*args, **options)
            stack.callback(lambda: [os.close(sink) for sink in made.sinks.values()])
            stack.callback(made.attendant.close)
            return made

        yield make


class Paper:
    """A surface that keeps what was drawn."""

    def __init__(self):
        self.drawn = []

    def show(self, lines):
        self.drawn.append(list(lines))

    def clear(self):
        return True

    def close(self, last):
        self.drawn.append([last])


def test_pieces_of_lines_are_put_together_rank_by_rank(ranks):
    two = ranks(2)
    two.say(0, b"on")
    two.say(1, b"other\nan")
    assert two.stream.getvalue() == "[rank 1] other\n"
    two.say(0, b"e\n")
    assert two.end() == "[rank 1] other\n[rank 0] one\n[rank 1] an\n"


def test_programs_read_what_ranks_say_alike_rank_by_rank(ranks):
    two = ranks(2)
    for rank, sink in two.sinks.items():
        os.write(sink, b"alike %d\nalike\n" % rank)
    assert sorted(two.end().splitlines()) == [
        "[rank 0] alike",
        "[rank 0] alike 0",
        "[rank 1] alike",
        "[rank 1] alike 1",
    ]


def test_what_a_bar_has_overwritten_is_not_passed_on(ranks):
    one = ranks(1)
    for share in range(100):
        one.say(0, b"\r%d %%" % share)
    assert one.stream.getvalue() == ""
    one.say(0, b"\r100 %\n")
    assert one.end() == "100 %\n"


def test_nested_bars_do_not_flood(ranks):
    one = ranks(1)
    one.say(0, b"\repoch 0")
    for share in range(100):
        one.say(0, b"\n\rbatch %d\x1b[A" % share)
    one.say(0, b"\repoch 1\n")
    assert one.end() == "epoch 0\nepoch 1\n"


def test_a_bar_stands_below_the_status_until_it_is_a_line(ranks):
    paper = Paper()
    status = StatusLine("train", 2, paper)
    two = ranks(2, status=status)
    for data in (b"\r10 %", b"\r20 %", b"\r20 %\n"):
        status.due = time.monotonic()
        two.say(1, data)
    assert two.end() == "[rank 1] 20 %\n"
    state = "train  0 of 2 ranks returned  0 s"
    assert paper.drawn == [
        [state, "[rank 1] 10 %"],
        [state, "[rank 1] 20 %"],
        [state],
        ["train  stopped, 0 of 2 ranks had returned  0 s"],
    ]


def test_a_status_comes_after_a_moment_only(ranks):
    paper = Paper()
    two = ranks(2, status=StatusLine("train", 2, paper))
    two.say(0, b"quick\n")
    assert two.end() == "[rank 0] quick\n"
    assert paper.drawn == []


def test_something_left_behind_with_the_pipe_in_its_hand_is_not_waited_for(ranks):
    one = ranks(1)
    os.write(one.sinks[0], b"a line\nand half")
    one.attendant.close()
    assert one.stream.getvalue() == "a line\nand half\n"


def test_a_stream_that_is_gone_does_not_end_the_call(ranks):
    one = ranks(1)
    one.stream.close()
    one.say(0, b"hello\n")


def test_what_the_callers_stream_cannot_say_is_replaced(ranks):
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii")
    one = ranks(1, stream=stream)
    one.say(0, "5 \N{MULTIPLICATION SIGN} \n".encode() + b"\xff\n")
    assert raw.getvalue() == b"5 ? \n?\n"


def test_without_streams_and_status_a_rank_inherits_everything():
    attendant = OutputForwarder(2)
    with attendant.open_streams(0) as (streams, record):
        assert (streams, record) == ({"stdout": None, "stderr": None}, None)
    attendant.close()
