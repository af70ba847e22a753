"""`samestep verify` that is told to end, or killed: nothing that it has started goes on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from samestep.cli import main
from samestep.collectives.segments import process_alive
from samestep.verification import verify

STAYS = """
import os, sys, time
told = os.open(sys.argv[1], os.O_WRONLY)
os.write(told, f"{os.getpid()} {os.getppid()}\\n".encode())
time.sleep(600)  # it is ended long before
"""


@pytest.fixture
def started(tmp_path):
    """A verification in its first run, its processes, and the folder for what is temporary."""
    (tmp_path / "stays.py").write_text(STAYS)
    (tmp_path / "temporary").mkdir()
    os.mkfifo(tmp_path / "pids")
    command = [sys.executable, "-m", "samestep", "verify", str(tmp_path / "stays.py"), str(tmp_path / "pids")]
    verification = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with (tmp_path / "pids").open() as told:
        lines = [told.readline(), told.readline()]
    yield verification, [int(pid) for line in lines for pid in line.split()], tmp_path / "temporary"
    verification.kill()
    verification.wait()
    verification.stderr.close()


def test_a_signal_ends_what_runs_and_removes_what_it_has_left(started):
    verification, processes, temporary = started
    assert list(temporary.glob("samestep-verify-*"))
    verification.send_signal(signal.SIGTERM)
    said = verification.communicate()[1]
    assert verification.returncode == 128 + signal.SIGTERM
    assert said.splitlines()[-1] == (
        "samestep: SIGTERM has ended the verification before its verdict; what it had started has ended too"
    )
    assert [pid for pid in processes if process_alive(pid)] == []
    assert list(temporary.glob("samestep-verify-*")) == []


def test_what_runs_ends_with_a_verification_that_is_killed(started):
    verification, processes, _ = started
    handles = [os.pidfd_open(pid) for pid in set(processes)]
    verification.kill()
    for handle in handles:
        assert select.select([handle], [], [], 20)[0]
        os.close(handle)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_asks_for_the_end_is_the_exit_code(monkeypatch, capsys, tmp_path, number):
    before = signal.getsignal(number)
    monkeypatch.setattr(verify, "examine", lambda *_, **__: signal.raise_signal(number))
    (tmp_path / "train.py").touch()
    assert main(["verify", str(tmp_path / "train.py")]) == 128 + number
    assert f"{number.name} has ended the verification before its verdict" in capsys.readouterr().err
    assert signal.getsignal(number) is before


def test_a_terminal_that_goes_away_is_ignored_where_it_was_before(monkeypatch, tmp_path):
    """Of `nohup samestep verify`."""

    def examine(*_, **__):
        signal.raise_signal(signal.SIGHUP)
        raise LookupError

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(verify, "examine", examine)
        (tmp_path / "train.py").touch()
        with pytest.raises(LookupError):
            main(["verify", str(tmp_path / "train.py")])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
