"""Who is to blame, decided without any process."""

from __future__ import annotations

import json

import pytest

from samestep.errors import CheckpointError, DataError
from samestep.launch.failure import Failure, culprit, death, describe, exit_code, lost_peer


def failed(rank, time, **options):
    values = {"pid": 1, "exception": "ValueError", "message": "m", "exit_code": 1, "traceback": "t"} | options
    return Failure(rank=rank, time=time, **values)


@pytest.mark.parametrize(
    "message",
    [
        "[/p/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is typically caused by",
        "[/p/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
        "[/p/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
        "NCCL error in: x.cpp:1, remote process exited or there was a network error; ncclRemoteError",
        "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1",
    ],
)
def test_a_message_about_a_peer_is_a_victims(message):
    assert lost_peer(RuntimeError(message))


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("Connection reset by peer")]
)
def test_other_errors_are_a_ranks_own(error):
    assert not lost_peer(error)


def test_an_own_error_explains_an_earlier_lost_peer():
    assert culprit([failed(0, 1.0, lost_peer=True), failed(2, 5.0)], {}, 3).rank == 2


def test_the_earliest_of_several_own_errors_is_blamed():
    assert culprit([failed(0, 3.0), failed(2, 2.0)], {}, 3).rank == 2


def test_an_abort_without_a_word_is_blamed_after_any_exception_and_before_a_lost_peer():
    abort = failed(1, 1.0, signal=6, traceback="")
    assert culprit([abort, failed(0, 2.0)], {}, 2).rank == 0
    assert culprit([abort, failed(0, 0.5, lost_peer=True)], {}, 2).rank == 1


def test_a_rank_that_ended_well_is_blamed_when_the_others_only_lost_a_peer():
    blamed = culprit([failed(0, 2.0, lost_peer=True)], {1: 4242}, 2)
    assert (blamed.rank, blamed.pid, blamed.exit_code, blamed.exception) == (1, 4242, 1, "EarlyExit")


def test_nobody_is_blamed_where_nobody_failed():
    assert culprit([], {0: 1, 1: 2}, 2) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), 1),
        (DataError("x"), 2),
        (CheckpointError("x"), 1),
        (SystemExit(), 0),
        (SystemExit(5), 5),
        (SystemExit("text"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_exception_ends_a_process_with_its_own_code(error, code):
    assert exit_code(error) == code


def test_a_record_is_written_whole(tmp_path):
    try:
        raise DataError("too small")
    except DataError as error:
        record = describe(error, 3)
    record.write(tmp_path / "rank3.error.json")
    assert Failure(**json.loads((tmp_path / "rank3.error.json").read_text())) == record
    assert record.usage
    assert record.where.startswith(__file__)
    assert record.source == 'raise DataError("too small")'


def test_a_death_is_told_by_its_signal():
    assert (death(1, 2, -9).exit_code, death(1, 2, 9).exit_code) == (137, 9)
    assert "SIGKILL" in death(1, 2, -9).message
