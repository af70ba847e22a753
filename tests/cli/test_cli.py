"""The door: help without torch, and usage errors of one line that say how to fix them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from samestep.cli import main


def test_the_version_is_shown(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("samestep ")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], []])
def test_help_has_examples_and_takes_no_torch(arguments):
    code = (
        "import sys; from samestep.cli import main\n"
        "try: code = main(sys.argv[1:])\nexcept SystemExit as error: code = error.code\n"
        "heavy = {'torch', 'numpy', 'rich', 'multiprocessing'} & set(sys.modules)\n"
        "print(code, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.split()[0] in {"0", "None"}
    assert done.stderr.endswith("set()\n")
    assert "samestep run -n 2 train.py" in done.stdout


@pytest.mark.parametrize("words", [["run", "--help"], ["report", "--help"], ["plan", "--help"]])
def test_a_locale_without_our_characters_is_no_reason_to_fail(words):
    command = [sys.executable, "-m", "samestep", *words]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_python_m_samestep_is_the_same_program():
    done = subprocess.run([sys.executable, "-m", "samestep", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("samestep ")


@pytest.mark.parametrize("command", ["run", "verify", "plan"])
@pytest.mark.parametrize(
    ("content", "what"),
    [(b"#!/bin/bash\necho hello\n", "a script for bash"), (b"\x7fELF\x02\x01\x01\0\0", "no text")],
)
def test_what_is_no_python_is_refused(command, content, what, tmp_path, capsys):
    (tmp_path / "start").write_bytes(content)
    assert main([command, str(tmp_path / "start")]) == 2
    assert f"start is {what}: name a Python script" in capsys.readouterr().err


def test_a_shell_script_that_goes_on_in_python_is_run(tmp_path, capfd):
    (tmp_path / "start").write_text("#!/bin/sh\n'''exec' python3 \"$0\" '''\nprint('here')\n", encoding="utf-8")
    assert main(["run", "--run-dir", str(tmp_path / "kept"), str(tmp_path / "start")]) == 0
    assert "here" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu", "x.py"], "there is no command 'rnu': did you mean `samestep run`?"),
        (["train.py", "-n", "2"], "did you mean `samestep run train.py -n 2`?"),
        (["run"], "no script is given: `samestep run -n 2 train.py`"),
        (["run", "-m"], "no script is given"),
        (["run", "nowhere.py"], "there is no script nowhere.py in"),
        (["run", "json.tool"], "for the module, `samestep run -m json.tool`"),
        (["run", "-m", "no.such.module"], "there is no module no.such.module"),
        (["run", "-m", "collections.abc.x"], "there is no module collections.abc.x"),
        (["run", "-m", "logging"], "logging is a package without a __main__.py"),
        (["run", "-n", "0", "x.py"], "'0' is not a number of processes; give 1 or more, or auto"),
        (["run", "-n", "-1", "x.py"], "argument -n"),
        (["run", "-n", "abc", "x.py"], "'abc' is not a number of processes"),
        (["run", "-n"], "argument -n: expected one argument"),
        (["run", "-np", "2", "x.py"], "argument -n: -np is mpiexec's; here it is -n N"),
        (["run", "--check=16", "x.py"], "argument --check: it takes no value; `samestep run --help`"),
        (["run", "--dry", "x.py"], "unknown option --dry: did you mean --dry-run?"),
        (["run", "-n", "2", "--run-dri=x", "x.py"], "unknown option --run-dri: did you mean --run-dir?"),
    ],
)
def test_a_usage_error_is_one_line_and_code_2(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("samestep: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert not shown.out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["run", "verify", "plan", "watch", "report", "doctor"])
def test_a_directory_that_was_deleted_is_named_as_the_cause(capsys, monkeypatch, tmp_path, command):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main([command, *(["train.py"] if command in {"run", "verify", "plan"} else [])]) == 2
    shown = "samestep: error: the current directory was deleted: go to one that is there, with cd\n"
    assert capsys.readouterr().err == shown


def test_a_run_directory_is_not_used_twice(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "run.json").touch()
    assert main(["run", "--run-dir", "here", "train.py"]) == 2
    assert "here holds another run already" in capsys.readouterr().err


def test_a_dry_run_shows_what_a_shell_would_take_and_starts_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "train.py").touch()
    assert main(["run", "-n", "2", "--dry-run", "train.py", "--name", "a b"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("samestep.launch.rank.bootstrap") == 2
    assert "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2" in shown
    assert "OMP_NUM_THREADS=" in shown
    assert "train.py --name 'a b'" in shown
    assert os.listdir(tmp_path) == ["train.py"]  # noqa: PTH208


@pytest.mark.parametrize(("visible", "expected"), [("", 0), ("0", 1), ("1,0,-1,2", 2), ("GPU-abc,1", 2)])
def test_auto_counts_the_gpus_that_cuda_would_see(monkeypatch, tmp_path, visible, expected):
    from samestep.launch.resources import visible_gpus

    for index in range(4):
        (tmp_path / "driver" / str(index)).mkdir(parents=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert visible_gpus(tmp_path / "driver") == expected


def test_json_says_how_the_run_ended(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(5)")
    assert main(["run", "-n", "1", "--json", "result.json", "train.py"]) == 5
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == {"exit", "run_dir", "failure"}
    assert set(result["failure"]) == {
        "kind",
        "rank",
        "host",
        "pid",
        "signal",
        "exception",
        "message",
        "where",
        "waiting",
    }
    assert result["exit"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slurm", "--hosts", "a,b"], "--slurm and --hosts do not go together: Slurm chooses the hosts"),
        (["--slurm", "--node-rank", "0"], "--slurm and --node-rank do not go together"),
        (["--slurm", "--via", "pdsh"], "--slurm and --via do not go together"),
        (["--slurm", "--nnodes", "0"], "--nnodes 0: give the number of hosts, 1 or more"),
        (["--slurm", "--env", "NO_SUCH"], "--env NO_SUCH: there is no such variable here"),
        (["--sbatch-args", "--time=1"], "--sbatch-args is for sbatch: say --slurm as well"),
        (["--via", "ssh"], "--via is about other hosts, and none is named: say --hosts or --hostfile as well"),
        (["--env", "PATH"], "--env is about other hosts"),
        (["--ssh-args", "-p 22"], "--ssh-args is about other hosts"),
        (["--remote-python", "/usr/bin/python"], "--remote-python is about other hosts"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "localhost:1", "--env", "PATH"], "--env is about other"),
        (["--node-rank", "0"], "--node-rank says which of several hosts this is: say --nnodes N"),
        (["--nnodes", "-1"], "--nnodes -1: give the number of hosts"),
        (["--grace", "-1"], "argument --grace: '-1' is not a number of seconds; give 0 or more"),
        (["--grace", "soon"], "'soon' is not a number of seconds"),
        (["--join-timeout", "-5"], "argument --join-timeout: '-5' is not a number of seconds"),
        (["--join-timeout", "inf"], "'inf' is not a number of seconds"),
        (["--restarts", "1", "--lost-host", "continue"], "--lost-host continue goes on with the hosts that are left"),
        (
            ["--json", "nowhere/result.json"],
            "--json nowhere/result.json cannot be written: there is no directory nowhere",
        ),
        (["--json", "."], "--json . is a directory: name a file"),
        (["--json", "train.py/result.json"], "there is no directory train.py"),
        (["--run-dir", "train.py/run"], "train.py/run cannot be made: "),
    ],
)
def test_what_would_have_no_effect_or_fail_at_the_end_is_refused_at_once(
    capsys, monkeypatch, tmp_path, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    assert main(["run", *options, "train.py"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("samestep: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert os.listdir(tmp_path) == ["train.py"]  # noqa: PTH208


READ_ONLY = """
mount -t tmpfs none "$1" && cd "$1" && echo 'print(1)' >train.py && mount -o remount,ro . && shift && exec "$@"
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "cannot be made: "), (["--run-dir", "{0}/run", "--json", "result.json"], "cannot be written: you may not")],
)
def test_a_directory_that_cannot_be_written_is_one_line(tmp_path, options, message):
    (tmp_path / "read-only").mkdir()
    inside = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", tmp_path / "read-only"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    words = [option.format(tmp_path) for option in options]
    command = [*inside, sys.executable, "-P", "-m", "samestep", "run", *words, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr


def test_a_result_that_cannot_be_written_in_the_end_does_not_hide_the_runs_own_code(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os\nos.mkdir('result.json')\nraise SystemExit(5)")
    assert main(["run", "-n", "1", "--json", "result.json", "train.py"]) == 5
    assert capfd.readouterr().err.endswith("samestep: error: --json result.json is a directory: name a file in it\n")


def test_a_run_directory_that_only_the_attempt_shows_to_be_impossible_is_one_line(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    name = "x" * 300
    assert main(["run", "-n", "1", "--run-dir", name, "train.py"]) == 2
    said = capfd.readouterr().err
    assert said == f"samestep: error: the run directory {tmp_path}/{name} cannot be written: File name too long\n"


def test_a_dry_run_of_one_of_several_hosts_shows_its_own_ranks(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    where = ["--nnodes", "3", "--node-rank", "1", "--rendezvous", "localhost:29500"]
    assert main(["run", *where, "-n", "2", "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "# node 1 of 3; sizes and ranks hold if every node brings 2\n" in shown
    assert [line for line in shown.splitlines() if line.startswith("# rank ")] == ["# rank 2", "# rank 3"]
    assert "RANK=2 LOCAL_RANK=0 WORLD_SIZE=6 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=3 " in shown
    assert "MASTER_ADDR='<address>' MASTER_PORT='<port>' TORCHELASTIC_RUN_ID='<of node 0>'" in shown


def test_a_dry_run_of_a_task_says_what_is_not_known_yet(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    told = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "\n# rank 2\nRANK=2 LOCAL_RANK='<found>' WORLD_SIZE=3 " in shown
    assert shown.count("\n# rank ") == 1


def test_a_dry_run_over_hosts_fills_the_room_that_each_has(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["run", "--hosts", "a:2,b", "--pass-local-rank", "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "RANK=1 LOCAL_RANK=1 WORLD_SIZE=3" in shown
    assert "RANK=2 LOCAL_RANK=0 WORLD_SIZE=3" in shown
    passed = [line.rpartition(" ")[2] for line in shown.splitlines() if "--local-rank=" in line]
    assert passed == ["--local-rank=0", "--local-rank=1", "--local-rank=0"]


def test_grace_and_variables_go_into_the_batch_script(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "a secret")
    (tmp_path / "train.py").touch()
    assert main(["run", "--slurm", "--dry-run", "train.py"]) == 0
    plain = capsys.readouterr().out
    assert "--signal=B:USR1@60\n" in plain
    assert "--grace" not in plain
    assert main(["run", "--slurm", "--grace", "120", "--env", "MINE", "--dry-run", "train.py"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --signal=B:USR1@150\n" in script
    assert "#SBATCH --export=ALL,MINE\n" in script
    assert " --grace 120 " in script
    assert "a secret" not in script


def test_the_help_begins_with_what_a_newcomer_does_first(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out.partition("commands:\n")[2].splitlines()[:8]
    assert [line.split()[0] for line in shown[:4]] == ["run", "verify", "watch", "report"]
