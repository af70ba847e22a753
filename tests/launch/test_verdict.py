"""The last lines of a run, decided without any process."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.launch.rank.failure import FailureRecord
from samestep.launch.result import decide, summary_lines


def failed(rank, **options):
    values = {"pid": 10 + rank, "exception": "ValueError", "message": "no", "exit_code": 1, "host": "h"} | options
    return FailureRecord(rank=rank, **{"time": float(rank), "where": "train.py:3", "source": "go()", **values})


def lines(verdict):
    return summary_lines(verdict, Path("runs/x/0/h"))


def test_a_run_that_went_well_says_where_its_files_lie():
    verdict = decide({0: 0, 1: 0}, [], {0: 10, 1: 11}, None)
    assert (verdict.exit_code, lines(verdict)) == (0, ["samestep: logs: runs/x/0/h"])


def test_the_root_cause_comes_first_then_its_line_and_the_victims():
    verdict = decide({0: 1, 1: 4, 2: -15}, [failed(0, lost_peer=True), failed(1, exit_code=4)], {}, None)
    assert (verdict.exit_code, verdict.lost_peer_ranks) == (4, (0, 2))
    assert lines(verdict) == [
        "samestep: error: rank 1 of 3 failed: ValueError: no",
        "    at train.py:3  go()",
        "    rank 1, host h, process 11, exit code 4; ranks 0, 2 lost their connection to it",
        "    logs: runs/x/0/h",
    ]


def test_what_all_ranks_say_is_said_once_and_the_lowest_rank_stands_for_all():
    verdict = decide({0: 1, 1: 1}, [failed(1), failed(0)], {}, None)
    assert verdict.root_cause.rank == 0
    assert lines(verdict)[0] == "samestep: error: all 2 ranks failed: ValueError: no"


def test_a_usage_error_is_shown_as_its_message_alone():
    verdict = decide({0: 2}, [failed(0, usage=True, message="batch size 1 is too small", exit_code=2)], {}, None)
    assert lines(verdict)[0] == "samestep: error: batch size 1 is too small"


def test_a_rank_that_waited_in_vain_is_not_called_the_culprit():
    message = "[/g/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
    alone = failed(0, lost_peer=True, message=message, traceback="Traceback …\nRuntimeError: …\n")
    verdict = decide({0: 1, 1: -15}, [alone], {}, None)
    assert verdict.lost_peer_ranks == ()
    shown = lines(verdict)
    assert shown[:2] == ["Traceback …", "RuntimeError: …"]
    assert shown[2].startswith(
        "samestep: error: rank 0 of 2 lost its connection to other ranks, and no rank reported a cause: Timed out"
    )
    assert "rank 1 had not failed when stopped: look there first" in shown[-2]


@pytest.mark.parametrize(
    ("kind", "others"),
    [("hang", "rank 1 was waiting for it"), ("deadlock", "rank 1 was waiting too")],
    ids=["for the culprit", "each for the others"],
)
def test_of_ranks_that_wait_for_each_other_none_is_said_to_be_waited_for(kind, others):
    hung = failed(0, kind=kind, exception="Hang", message="no progress for 9 s: why", exit_code=124)
    assert lines(decide({0: -9, 1: -9}, [hung], {}, None))[-2].endswith(others)


def test_a_hang_which_was_explained_when_it_was_found_is_not_explained_again():
    message = "no progress for 9 s: rank 0 is asleep; rank 1 is waiting for it"
    hung = failed(0, exception="Hang", message=message, exit_code=124, where="train.py:8")
    told = lines(replace(decide({0: -9, 1: -9}, [hung], {}, None), positions={1: "train.py:20"}))
    assert told[0] == "samestep: error: the run hung and was stopped: no progress for 9 s: rank 0 is asleep"
    assert told[1].startswith("    at train.py:8")
    assert not [line for line in told if "train.py:20" in line]


def test_an_interrupted_run_blames_nobody():
    verdict = decide({0: -2, 1: -2}, [], {}, signal.SIGINT)
    assert verdict.exit_code == 130
    assert lines(verdict)[0] == "samestep: interrupted by SIGINT: all 2 ranks have ended"
    assert decide({0: 0, 1: 0}, [], {}, signal.SIGTERM).exit_code == 0
