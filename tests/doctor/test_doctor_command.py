"""`samestep doctor` on this machine: the command itself, with real ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from samestep.cli import doctor, main
from samestep.doctor import checks
from samestep.doctor.finding import Finding, ok
from samestep.errors import UsageError
from samestep.launch.hosts.mpiexec import mpiexec
from samestep.rankenv import fresh_environment


def found_by(folder, code):
    """Returns what a doctor that has ended with a code has written in a folder."""
    told = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert told["v"] == 2
    assert told["verdict"] == ("fails" if code else "works")
    assert all(set(line) == {"check", "level", "text", "effect", "fix", "host"} for line in told["lines"])
    return {line["check"]: line for line in told["lines"]}


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """Runs the command in this process; returns its exit code, its lines, and what it found."""

    def ask(*options, **variables):
        monkeypatch.chdir(tmp_path)
        for name in set(os.environ) - set(fresh_environment()):
            monkeypatch.delenv(name)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for which the session's fork server has imported torch
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = main(["doctor", *options, "--json", "found.json"])
        return code, capsys.readouterr().out.splitlines(), found_by(tmp_path, code)

    return ask


@pytest.fixture
def quick(monkeypatch):
    """Leaves out what takes long and is seen elsewhere: pip, the disk, and processes of mpiexec."""
    monkeypatch.setattr("samestep.doctor.software.check", lambda: ())
    monkeypatch.setattr("samestep.doctor.machine.check_disk", lambda _: ())
    monkeypatch.setattr("samestep.doctor.trial._mpi", lambda _: [])


@pytest.mark.usefixtures("quick")
def test_this_machine_trains(asked, tmp_path: Path) -> None:
    assert_trains(asked, tmp_path)


@pytest.mark.prove
def test_this_machine_trains_with_its_packages_its_disk_and_mpi(asked, tmp_path: Path) -> None:
    found = assert_trains(asked, tmp_path)
    if find_spec("mpi4py") is not None:
        assert found["step over mpi"]["level"] == "ok"


def assert_trains(asked, tmp_path: Path) -> dict[str, dict[str, str]]:
    code, shown, found = asked()
    assert code == 0, shown
    assert {found[f"step over {backend}"]["level"] for backend in ("gloo", "samestep")} == {"ok"}
    assert all(line["fix"] for line in found.values() if line["level"] in {"warning", "error"})
    assert "training would work" in shown[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]
    return found


@pytest.mark.usefixtures("quick")
def test_a_variable_that_ends_training_is_found_and_so_is_what_it_does(asked) -> None:
    code, shown, found = asked("--wrong", GLOO_SOCKET_IFNAME="eth77", RANK="1")
    assert code == 1
    assert found["GLOO_SOCKET_IFNAME"]["fix"] == "unset GLOO_SOCKET_IFNAME"
    assert "WORLD_SIZE is not" in found["rank variables"]["text"]
    assert found["step over gloo"]["level"] == "error"
    assert "eth77" in found["step over gloo"]["text"]
    assert "samestep run -n 2 -m samestep.doctor.step" in found["step over gloo"]["fix"]
    assert "training would fail" in shown[-1]
    assert [line for line in shown if line.startswith("ok")] == [line for line in shown if "(--all shows them)" in line]


def test_a_terminal_shows_what_is_wrong_and_counts_the_rest(asked, monkeypatch) -> None:
    lines = [ok("python", "3.11"), ok("torch", "2.13"), Finding("disk", "warning", "full", "no room", "rm")]
    monkeypatch.setattr("samestep.doctor.checks.run_checks", lambda *_: lines)
    assert [line.split()[1] for line in asked()[1][:3]] == ["python", "torch", "disk"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _, shown, found = asked()
    assert [" ".join(re.sub(r"\x1b\[[\d;]*m", "", line).split()) for line in shown] == [
        "WARNING disk full",
        "causes: no room",
        "fix: rm",
        "ok 2 other checks (--all shows them)",
        "",
        "training would work: 1 warning",
    ]
    assert sorted(found) == ["disk", "python", "torch"]
    assert "python" in asked("--all")[1][0]


@pytest.mark.usefixtures("quick")
def test_ranks_that_nobody_started_are_found(asked, monkeypatch) -> None:
    monkeypatch.setitem(checks.TIMEOUTS, "env", 0.5)
    left = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29641"}
    code, _, found = asked(**left)
    assert code == 1
    assert found["ranks of this job"]["text"].startswith("env says that this is rank 0 of 3, and they do not meet: ")
    assert found["step over gloo"]["level"] == "ok"


QUICK = """
import sys
from samestep.cli import main
from samestep.doctor import software, trial
software.check = trial.check = lambda: ()
sys.exit(main(["doctor", "--json", "found.json"]))
"""


@pytest.mark.prove
def test_processes_of_mpiexec_are_looked_at_together(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    command = [mpiexec(), "-n", "2", sys.executable, "-P", "-c", QUICK]
    done = subprocess.run(
        command, cwd=tmp_path, env=fresh_environment(), capture_output=True, text=True, timeout=250, check=False
    )
    found = found_by(tmp_path, done.returncode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["links"]["text"].startswith("1 pair, median ")
    assert found["clocks"]["level"] == found["shared folder"]["level"] == "ok"
    assert done.stdout.count("training would work") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--via", "pdsh"], "--via is about other hosts"),
        (["--hosts", "a", "--hostfile", "b"], "both say which hosts"),
        (["--all", "--wrong"], "exclude each other"),
        (["--hosts", "a,,b"], "a,,b"),
        (["--json", "no/such/folder/file"], "no directory no/such/folder"),
        (["--host", "a"], "did you mean --hosts"),
    ],
)
def test_a_wrong_call_is_one_line(options, said):
    with pytest.raises(UsageError, match=said):
        doctor.main(options)


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    told = capsys.readouterr().out
    assert "srun --nodes 2" in told
    assert "exit code: 1 when training would fail" in told


def test_the_result_may_go_to_standard_output(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("samestep.doctor.checks.run_checks", lambda *_: [])
    monkeypatch.setattr(doctor, "_launched", lambda: None)
    assert doctor.main(["--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"v": 2, "verdict": "works", "lines": []}
    assert os.listdir(tmp_path) == []  # noqa: PTH208
