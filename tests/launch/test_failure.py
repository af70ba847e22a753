"""Who is to blame, decided without any process."""

from __future__ import annotations

import json
import signal
import textwrap
from pathlib import Path

import pytest
import torch

from samestep.errors import CheckpointError, DataError
from samestep.launch.rank import user_code
from samestep.launch.rank.failure import MOST_TEXT, FailureRecord, death, describe, exit_code, lost_peer
from samestep.launch.rank.user_code import relative_path
from samestep.launch.result import find_root_cause


def failed(rank, time, **options):
    values = {"pid": 1, "exception": "ValueError", "message": "m", "exit_code": 1, "traceback": "t"} | options
    return FailureRecord(rank=rank, time=time, **values)


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


def raised_in(filename, statement):
    """Returns what a statement raises in a file of that name, `value` being a tensor that has a history."""
    names = {"value": torch.ones(1, requires_grad=True) * 2, "torch": torch}
    try:
        exec(compile(textwrap.dedent(statement), filename, "exec"), names)
    except RuntimeError as error:
        return error
    raise AssertionError("nothing was raised")


TORCH = Path(torch.__file__).parent
TIMED_OUT = "raise RuntimeError('timed out after 2 s')"


@pytest.mark.parametrize(
    "place", ["distributed/distributed_c10d.py", "nn/parallel/distributed.py", "autograd/graph.py"]
)
def test_what_torchs_communication_says_of_a_peer_is_a_victims(place):
    assert lost_peer(raised_in(str(TORCH / place), TIMED_OUT))


@pytest.mark.parametrize(
    "place", ["/home/me/train.py", str(TORCH / "utils/data/dataloader.py"), str(TORCH / "_utils.py")]
)
def test_what_times_out_elsewhere_is_a_ranks_own(place):
    assert not lost_peer(raised_in(place, TIMED_OUT))


GLOO = "[/p/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
NATIVE = f"""
def hook(_):
    raise RuntimeError({GLOO!r})
value.register_hook(hook)
"""


def test_the_scripts_own_raise_is_not_taken_for_a_peers_whatever_it_says():
    assert not lost_peer(raised_in("/home/me/train.py", f"raise RuntimeError({GLOO!r})"))
    assert not lost_peer(raised_in("/home/me/train.py", NATIVE + "value.backward()"))


@pytest.mark.parametrize("call", ["dist.all_reduce(value, async_op=True).wait()", "loss.backward()", "meet()"])
def test_a_peer_lost_in_native_code_that_the_script_called_is_not_the_scripts_error(folder, call):
    script = folder.script(f"""
        import datetime, torch, torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        value = torch.ones(2)
        loss = model(value).sum()
        if rank == 1:
            time.sleep(60)
        {call}
    """)
    done = folder.run("-n", 2, script)
    assert "rank 0] lost its connection to other ranks at train.py:" in done.stderr, done.stderr
    assert "lost its connection to other ranks, and no rank reported a cause" in done.stderr


def test_an_error_of_c10ds_own_type_is_believed_wherever_it_comes_from():
    assert lost_peer(raised_in("/home/me/train.py", "raise torch.distributed.DistNetworkError('connection reset')"))
    assert not lost_peer(raised_in("/home/me/train.py", "raise torch.distributed.DistBackendError('no such option')"))


def test_a_gpu_that_timed_out_is_a_ranks_own():
    message = "CUDA error: the launch timed out and was terminated"
    assert not lost_peer(raised_in(str(TORCH / "autograd/graph.py"), f"raise RuntimeError({message!r})"))


def test_an_own_error_explains_an_earlier_lost_peer():
    assert find_root_cause([failed(0, 1.0, lost_peer=True), failed(2, 5.0)], {}, 3).rank == 2


def test_the_earliest_of_several_own_errors_is_blamed():
    assert find_root_cause([failed(0, 3.0), failed(2, 2.0)], {}, 3).rank == 2


def test_an_abort_without_a_word_is_blamed_after_any_exception_and_before_a_lost_peer():
    abort = failed(1, 1.0, signal=6, traceback="")
    assert find_root_cause([abort, failed(0, 2.0)], {}, 2).rank == 0
    assert find_root_cause([abort, failed(0, 0.5, lost_peer=True)], {}, 2).rank == 1


def test_a_rank_that_ended_well_is_blamed_when_the_others_only_lost_a_peer():
    blamed = find_root_cause([failed(0, 2.0, lost_peer=True)], {1: 4242}, 2)
    assert (blamed.rank, blamed.pid, blamed.exit_code, blamed.exception) == (1, 4242, 1, "EarlyExit")


def test_nobody_is_blamed_where_nobody_failed():
    assert find_root_cause([], {0: 1, 1: 2}, 2) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), 1),
        (DataError("x"), 2),
        (CheckpointError("x"), 1),
        (SystemExit(), 0),
        (SystemExit(5), 5),
        (SystemExit("text"), 1),
        (SystemExit(256), 0),
        (SystemExit(-1), 255),
        (SystemExit(2**33 + 5), 5),
        (SystemExit(2**70), 255),
        (SystemExit(True), 1),
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
    assert FailureRecord(**json.loads((tmp_path / "rank3.error.json").read_text())) == record
    assert record.usage
    assert str(Path(record.where.rpartition(":")[0]).resolve()) == __file__
    assert record.source == 'raise DataError("too small")'


def test_a_death_is_told_by_its_signal():
    assert (death(1, 2, -9).exit_code, death(1, 2, 9).exit_code) == (137, 9)
    assert "SIGKILL" in death(1, 2, -9).message


def test_a_real_time_signal_has_a_name_though_python_has_none():
    assert death(1, 2, -signal.SIGRTMIN - 2).message == f"it was killed by SIGRTMIN+2 (signal {signal.SIGRTMIN + 2})"


class ProcessExitedException(Exception):  # noqa: N818  (what torch.multiprocessing raises)
    exit_code, error_pid, error_index, signal_name = -36, 0, 1, "<Unknown signal 36>"


def test_a_real_time_signal_of_a_spawned_process_is_named_too(monkeypatch):
    monkeypatch.delenv("SAMESTEP_LOGS", raising=False)
    failure = describe(ProcessExitedException(), 0)
    assert (failure.signal, failure.exit_code) == (36, 164)
    assert "SIGRTMIN+2 (signal 36" in failure.message


def test_an_endless_message_travels_in_part_and_says_where_all_of_it_is():
    record = describe(ValueError("m" * 40_000_000), 3)
    for text in (record.message, record.traceback):
        assert len(text) < MOST_TEXT + 100
        assert "rank3.err has all" in text
    assert record.traceback.startswith("ValueError: mmm")


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("nested")


def test_an_exception_that_cannot_be_printed_has_a_record(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        exec(compile("raise UnprintableError", "relative.py", "exec"), {"UnprintableError": UnprintableError})
    except UnprintableError as error:
        record = describe(error, 0)
    assert record.message == "<exception str() failed>"
    assert record.where == "relative.py:1"


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("train.py", "train.py"),
        ("./train.py", "train.py"),
        ("/home/work/train.py", "train.py"),
        ("sub/../train.py", "train.py"),
        ("../train.py", "/home/train.py"),
        ("/home/train.py", "/home/train.py"),
        ("<string>", "<string>"),
    ],
)
def test_a_file_has_one_name_however_a_process_was_told_of_it(monkeypatch, filename, name):
    """A rank and the process that it spawns name their script differently."""
    monkeypatch.setattr(user_code, "_start", ["/home/work"])
    assert relative_path(filename) == name


@pytest.mark.parametrize(
    "installed",
    [
        "/usr/lib/python3/dist-packages/torch/nn/modules/linear.py",  # Debian's, or seen by --system-site-packages
        "/home/me/.local/lib/python3.11/site-packages/torch/optim/sgd.py",
        "/opt/torch/lib/python3.11/site-packages/torch/_tensor.py",  # on the path of another environment
    ],
)
def test_packages_of_another_environment_are_not_the_users_files(installed):
    assert not user_code.is_user_file(installed)
    assert user_code.is_user_file("/home/me/packages/train.py")
