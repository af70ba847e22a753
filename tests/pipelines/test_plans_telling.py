"""What a long search is at: one line on a terminal of the first rank, and nothing anywhere else."""

from __future__ import annotations

import io
import sys

import pytest

from samestep.pipelines import telling
from samestep.pipelines.telling import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def told(monkeypatch):
    """Returns what is written when three things are said to a stream."""
    monkeypatch.setattr(telling, "_EVERY", 0.0)

    def told(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressLine() as one:
            for word in "abc":
                one.say(word)
        return stream.getvalue()

    return told


def test_on_a_terminal_a_line_is_written_over_and_goes_away(told):
    assert told(Terminal()) == "".join(f"\r\x1b[K{line}" for line in (*(f"samestep:    0 s  {x}" for x in "abc"), ""))


def test_behind_a_pipe_and_on_other_ranks_nothing_is_said(told, monkeypatch):
    assert told(io.StringIO()) == ""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert told(Terminal()) == ""


def test_things_that_are_said_at_once_are_said_once(told, monkeypatch):
    monkeypatch.setattr(telling, "_EVERY", 3600.0)
    assert told(Terminal()).count("samestep:") <= 1
