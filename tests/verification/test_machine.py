"""What a busy machine does to a run is no difference between N ranks and one; what the ranks do to each other is."""

from __future__ import annotations

import json
import socket
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from journals import Event, call, record

import samestep
from samestep.launch.rank import failure
from samestep.launch.rank.failure import death, lost_host
from samestep.verification import failures, machine, runner
from samestep.verification.files import Files
from samestep.verification.judging.record import Run
from samestep.verification.report import Report
from samestep.verification.runs import Ended, Script

STORE = (
    "The server socket has failed to listen on any local network address. port: {port}, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use"
)
ASYNCIO = "[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use"

# many tutorials write the port down, and alone no process group is needed
WRITTEN_DOWN = """
    import os, torch, torch.distributed as dist
    if int(os.environ["WORLD_SIZE"]) > 1:
        os.environ["MASTER_PORT"] = "{port}"
        dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
TWICE = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_world_size() > 1:
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not dist.get_rank() else None
        told = [own.port if own else None]
        dist.broadcast_object_list(told)
        if own is None:
            dist.TCPStore("127.0.0.1", told[0], is_master=True, wait_for_workers=False)
        dist.barrier()
"""


def ended(told: dict[str, object] | None, code: int = 1) -> Ended:
    return Ended(code=code, hung=False, failure=told, folder=Path("/nowhere"))


def failed(message: str) -> Ended:
    return ended({"rank": 0, "exception": "DistNetworkError", "message": message})


@pytest.fixture
def listener() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@pytest.fixture
def script(tmp_path: Path, listener: socket.socket) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(WRITTEN_DOWN.format(port=port_of(listener))), encoding="utf-8")
    return path


@pytest.mark.parametrize("message", [STORE, ASYNCIO])
def test_the_port_is_read_from_what_the_rank_has_said(message: str, listener: socket.socket) -> None:
    run = failed(message.format(port=port_of(listener)))
    assert machine.taken_port(run) == port_of(listener)
    assert f"another program listens on port {port_of(listener)}" in (machine.to_blame(run) or "")


def test_of_other_failures_no_port_is_to_blame() -> None:
    assert machine.taken_port(failed("connection refused, port: 29500")) is None
    assert machine.taken_port(failed("[Errno 98] Address already in use")) is None
    assert machine.taken_port(ended(None)) is None
    assert machine.to_blame(failed("only here")) is None


def test_a_port_that_nobody_has_any_more_is_not_to_blame(listener: socket.socket) -> None:
    run = failed(STORE.format(port=port_of(listener)))
    assert not machine.comes_free(port_of(listener), 0.0)
    listener.close()
    assert machine.comes_free(machine.taken_port(run) or 0, 0.0)
    assert machine.to_blame(run) is None


@pytest.mark.parametrize("own", [True, False])
def test_memory_that_ran_out_is_the_machines(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "counts_own_kills", lambda: own)
    told = death(1, 2, -9, of_memory=True).as_json([])
    assert "not enough memory for so many ranks: rank 1" in (machine.to_blame(ended(told, 137)) or "")
    assert machine.to_blame(ended(death(1, 2, -9).as_json([]), 137)) is None  # somebody else's signal


@pytest.mark.parametrize("message", ["[Errno 28] No space left on device", "[Errno 122] Disk quota exceeded: 'a'"])
def test_a_full_disk_is_the_machines(message: str) -> None:
    assert (machine.to_blame(failed(message)) or "").startswith("a disk is full")


def test_a_lost_agent_and_a_killed_launcher_are_the_machines() -> None:
    lost = asdict(lost_host(0, "here", "its agent has ended"))
    assert "its agent has ended" in (machine.to_blame(ended(lost)) or "")
    assert "signal 9 has ended the launcher" in (machine.to_blame(ended(None, -9)) or "")


def test_ranks_whose_port_another_program_has_are_not_called_different(
    script: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_FREE_S", 0.0)
    report = samestep.verify(script)
    assert (report.verdict, report.errors) == ("inconclusive", [])
    assert f"another program listens on port {port_of(listener)}" in str(report)


def test_ranks_whose_port_comes_free_are_run_once_more(
    script: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(port: int, seconds: float) -> bool:
        del seconds
        assert port == port_of(listener)
        listener.close()
        return True

    monkeypatch.setattr(machine, "comes_free", free)
    report = samestep.verify(script)
    assert [finding.code for finding in report.errors if finding.code == "crash"] == []
    assert report.steps == 1


@pytest.mark.prove
def test_ranks_that_take_a_port_twice_are_a_difference(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TWICE), encoding="utf-8")
    report = samestep.verify(script)
    assert [finding.code for finding in report.errors] == ["crash"]
    assert "address already in use" in report.errors[0].cause


@pytest.mark.parametrize(
    ("message", "waits", "times"),
    [
        ("[Errno 98] Address already in use", False, 2),  # of no port that is known
        (STORE.format(port=2950), True, 2),
        (STORE.format(port=2950), False, 1),
        ("only here", True, 1),
    ],
)
def test_a_run_is_made_once_more_for_a_port_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, *, waits: bool, times: int
) -> None:
    monkeypatch.setattr(machine, "comes_free", lambda port, _: waits and port == 2950)
    names: list[str] = []

    class Failing(runner.Runner):
        def _once(self, name: str, *_: object) -> Run:
            names.append(name)
            return Run(failed(message), record())

    said: list[str] = []
    script = Script(program="train.py")
    files = Files([], tmp_path)
    Failing(script=script, ranks=2, folder=tmp_path, files=files, still_s=60.0, say=said.append).recorded("again", 2)
    assert names == ["again", "again, once more"][:times]
    assert said == ["run 1 of 3: again", "again: once more, for a port was taken"][:times]


@pytest.mark.parametrize(("least", "is_told"), [(0.0, True), (60.0, False)])
def test_a_long_recording_is_told_with_the_way_to_a_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float, *, is_told: bool
) -> None:
    monkeypatch.setattr(runner, "_LONG_S", least)

    class Recording(runner.Runner):
        def _once(self, name: str, *_: object) -> Run:
            return Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), record())

    said: list[str] = []
    files = Files([], tmp_path)
    script = Script(program="train.py")
    Recording(script=script, ranks=2, folder=tmp_path, files=files, still_s=60.0, say=said.append).first(64, 2)
    assert said[0] == "run 1 of 3: recording 2 ranks"
    assert any("--steps K compares fewer steps" in line for line in said[1:]) is is_told


@pytest.mark.parametrize("is_known", [True, False])
def test_a_run_without_progress_is_a_hang_only_where_something_shows_what_is_waited_for(
    tmp_path: Path, *, is_known: bool
) -> None:
    """Else the machine may be so busy that the ranks have not begun."""
    waits = [call("train.py:30")] if is_known else []
    recorded = Run(Ended(code=1, hung=True, failure=None, folder=tmp_path), record(waits, waits[:0]))
    alone = Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), record([]))
    report = Report(ranks=2)
    failures.blame(recorded, alone, lambda: alone, report)
    assert [one.code for one in report.errors] == (["hang"] if is_known else [])
    assert ("may be too busy" in (report.inconclusive or "")) is not is_known


@pytest.mark.parametrize(("fails", "codes"), [(True, []), (False, ["crash"])])
def test_what_fails_while_samples_are_loaded_is_tried_in_one_process(
    tmp_path: Path, codes: list[str], *, fails: bool
) -> None:
    """One process is given the ranks' samples, and has loaded none of them."""
    failure = {"exception": "ValueError", "message": "bits must be between 1 and 8", "where": "data.py:7", "rank": 1}
    failed_run = Ended(code=1, hung=False, failure=failure, folder=tmp_path)
    loaded: Event = {"kind": "batch", "key": "train.py:9#1", "number": 0, "training": True, "window": 0}
    recorded, report = Run(failed_run, record([loaded], [loaded])), Report(ranks=2)
    alone = Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), record([]))
    failures.blame(recorded, alone, lambda: recorded if fails else alone, report)
    assert [one.code for one in report.errors] == codes
    assert ("where it loads its samples itself" in (report.inconclusive or "")) is fails


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [
        ("value = events[place]", True),
        ("return original(*args, **kwargs)", False),  # the script calls something that fails
        ("batch = next(self._batches)", False),  # a library's dataset fails
    ],
)
def test_a_failure_of_the_recorder_is_not_the_script_s(
    text: str, is_ours: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = Path(machine.__file__).parent
    said = (
        f'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n    loss.backward()\n'
        f'  File "{package}/recording/recorder.py", line 80, in on_backward\n    {text}\n'
        f'  File "{torch.__file__}", line 3, in backward\n    run()\nKeyError: 3\n'
    )
    (tmp_path / "run" / "1" / "a").mkdir(parents=True)
    told = {"rank": 0, "exception": "KeyError", "message": "3", "traceback": said}
    (tmp_path / "run" / "1" / "a" / "rank0.error.json").write_text(json.dumps(told))
    found = machine.recorder_fault(Ended(code=1, hung=False, failure=None, folder=tmp_path))
    assert (found is not None) == is_ours
    assert ("line 80" in capsys.readouterr().err) == is_ours
