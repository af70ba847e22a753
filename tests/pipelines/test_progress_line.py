"""The progress line of a long search: one line on a terminal of the first rank, and nothing anywhere else."""

from __future__ import annotations

import io
import sys

import pytest

from samestep.pipelines.plan import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def written(monkeypatch):
    """Returns what is written when three things are said to a stream."""
    monkeypatch.setattr(ProgressLine, "EVERY_S", 0.0)

    def written(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressLine() as one:
            for word in "abc":
                one.say(word)
        return stream.getvalue()

    return written


def test_on_a_terminal_a_line_is_written_over_and_goes_away(written):
    assert written(Terminal()) == "".join(
        f"\r\x1b[K{line}" for line in (*(f"samestep:    0 s  {x}" for x in "abc"), "")
    )


def test_behind_a_pipe_and_on_other_ranks_nothing_is_said(written, monkeypatch):
    assert written(io.StringIO()) == ""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert written(Terminal()) == ""


def test_things_that_are_said_at_once_are_said_once(written, monkeypatch):
    monkeypatch.setattr(ProgressLine, "EVERY_S", 3600.0)
    assert written(Terminal()).count("samestep:") <= 1
