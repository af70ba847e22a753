"""`samestep doctor` on this machine: the command itself, with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli import doctor
from samestep.errors import UsageError
from samestep.launch.mpiexec import mpiexec
from samestep.rankenv import fresh_environment

DOCTOR = [sys.executable, "-P", "-m", "samestep", "doctor"]


def asked(folder, *options, before=(), **variables):
    """Runs the command in a folder; returns its exit code and what it found."""
    environment = fresh_environment() | variables
    command = [*before, *DOCTOR, *options, "--json", "found.json"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert (folder / "found.json").exists(), done.stderr
    told = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert told["v"] == 1
    assert told["verdict"] == ("fails" if done.returncode else "works")
    assert all(set(line) == {"about", "level", "text", "effect", "mend", "host"} for line in told["lines"])
    return done, {line["about"]: line for line in told["lines"]}


def test_this_machine_trains(tmp_path: Path) -> None:
    done, found = asked(tmp_path)
    assert done.returncode == 0, done.stdout
    assert {found[f"step over {backend}"]["level"] for backend in ("gloo", "samestep")} == {"fine"}
    assert all(line["mend"] for line in found.values() if line["level"] in {"warning", "error"})
    assert "training would work" in done.stdout.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]


def test_a_variable_that_ends_training_is_found_and_so_is_what_it_does(tmp_path: Path) -> None:
    done, found = asked(tmp_path, "--wrong", GLOO_SOCKET_IFNAME="eth77", RANK="1")
    assert done.returncode == 1
    assert found["GLOO_SOCKET_IFNAME"]["mend"] == "unset GLOO_SOCKET_IFNAME"
    assert "WORLD_SIZE is not" in found["rank variables"]["text"]
    assert found["step over gloo"]["level"] == "error"
    assert "eth77" in found["step over gloo"]["text"]
    assert "samestep run -n 2 -m samestep.doctor.step" in found["step over gloo"]["mend"]
    assert "training would fail" in done.stdout.splitlines()[-1]
    assert not any(line.startswith("fine") for line in done.stdout.splitlines())


def test_ranks_that_nobody_started_are_found(tmp_path: Path) -> None:
    left = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29641"}
    done, found = asked(tmp_path, **left)
    assert done.returncode == 1
    assert found["ranks of this job"]["text"].startswith("env says that this is rank 0 of 3, and they do not meet: ")
    assert found["step over gloo"]["level"] == "fine"


def test_processes_of_mpiexec_are_looked_at_together(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    done, found = asked(tmp_path, before=[mpiexec(), "-n", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["links"]["text"].startswith("1 pair, median ")
    assert found["clocks"]["level"] == found["shared folder"]["level"] == found["step over mpi"]["level"] == "fine"
    assert done.stdout.count("training would work") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--via", "pdsh"], "--via is about other hosts"),
        (["--hosts", "a", "--hostfile", "b"], "both say which hosts"),
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
    monkeypatch.setattr("samestep.doctor.examine.examine", lambda *_: [])
    monkeypatch.setattr(doctor, "_launched", lambda: None)
    assert doctor.main(["--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"v": 1, "verdict": "works", "lines": []}
    assert os.listdir(tmp_path) == []  # noqa: PTH208
