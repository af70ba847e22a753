"""What the doctor says of what it sees: judged from texts and folders that are made up."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from samestep.cli import doctor as command
from samestep.doctor import environment, gpus, software, trial
from samestep.doctor.finding import Finding, guarded, ok, worst_level


def levels(lines):
    return [(line.check, line.level) for line in lines]


# --- lines -------------------------------------------------------------------------------------


def test_the_worst_line_decides():
    assert worst_level([]) == worst_level([ok("a", "b")]) == "ok"
    assert worst_level([Finding("a", "error", "b"), Finding("a", "warning", "b"), ok("a", "b")]) == "error"


def test_a_look_that_fails_is_a_line():
    def look():
        yield ok("a", "seen")
        raise ValueError("odd")

    assert [line.text for line in guarded("a", look)] == ["seen", "cannot be looked at: ValueError: odd"]


def test_hosts_that_agree_are_told_once():
    lines = [Finding("torch", "ok", "2.13", host=host) for host in "ab"]
    lines += [Finding("disk", "warning", "full", "no room", "rm", host="b")]
    told = command.shown(lines, wrong=False, coloured=False)
    assert [" ".join(line.split()) for line in told] == [
        "ok torch all hosts: 2.13",
        "WARNING disk b: full",
        "causes: no room",
        "fix: rm",
        "",
        "training would work: 1 warning",
    ]
    assert not any("torch" in line for line in command.shown(lines, wrong=True, coloured=False))
    assert "\x1b[33;1mWARNING" in command.shown(lines, wrong=True, coloured=True)[0]


def test_long_lines_are_broken_where_the_terminal_ends():
    line = Finding("disk", "warning", "full of " + "things " * 30, "no room", "rm -r " + "x" * 90)
    told = command.shown([line], wrong=False, coloured=False, width=72)
    assert all(len(text) <= 72 for text in told if "xxx" not in text)
    assert sum("things" in text for text in told) > 3


# --- software ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "gpus_here", "level"),
    [
        (None, 0, "error"),
        ("2.10.0", 0, "error"),
        ("1.13.1+cu117", 4, "error"),
        ("2.13.0+cpu", 0, "ok"),
        ("2.13.0+cpu", 2, "warning"),
        ("2.13.0+cu128", 2, "ok"),
        ("2.11.0a0+git1", 0, "ok"),
    ],
)
def test_torch_must_be_there_new_enough_and_for_the_gpus(installed, gpus_here, level):
    line = software.torch(installed, gpus_here, (12, 8) if installed and "cu" in installed else (0,))
    assert line.level == level
    assert bool(line.fix) == (level != "ok")


def test_packages_that_contradict_each_other_are_named():
    said = "torchvision 0.27.0 has requirement torch==2.12.0, but you have torch 2.13.0.\nblack 1 requires click."
    (line,) = software.conflicts((1, said))
    assert (line.level, line.text) == ("warning", said.splitlines()[0])
    assert line.fix == f"{shlex.quote(sys.executable)} -m pip install --upgrade torchvision torch==2.13.0"
    assert [line.level for line in software.conflicts((0, "No broken requirements found."))] == ["ok"]
    assert [line.level for line in software.conflicts((1, "black 1 requires click."))] == ["ok"]


@pytest.mark.parametrize("answer", [(1, "/usr/bin/python: No module named pip"), (-1, "timed out")])
def test_an_environment_without_pip_is_not_called_sound(answer):
    (line,) = software.conflicts(answer)
    assert (line.level, line.fix) == ("note", f"{shlex.quote(sys.executable)} -m ensurepip")


def test_slurm_is_judged_by_its_nodes():
    line = software.slurm((0, "4 idle\n1 down*"), configured=True, release="slurm 23.11.4")
    assert line.text == "slurm 23.11.4, nodes: 4 idle, 1 down*"
    assert software.slurm((0, "2 drained\n1 down*"), configured=True).level == "warning"
    assert software.slurm((1, "sinfo: error: no controller"), configured=True).level == "warning"
    assert software.slurm((1, "no configuration"), configured=False).level == "ok"


# --- variables ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_DEBUG", "INFO", "note"),
        ("NCCL_DEBUG", "WARN", None),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "error"),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", None),
        ("OMP_NUM_THREADS", "100000", "warning"),
        ("OMP_NUM_THREADS", "all", "warning"),
        ("OMP_NUM_THREADS", "1", "note"),
        ("OMP_PROC_BIND", "false", None),
        ("OMP_PROC_BIND", "close", "warning"),
        ("CUDA_VISIBLE_DEVICES", "", "note"),
        ("OMP_WAIT_POLICY", "ACTIVE", "warning"),
        ("KMP_BLOCKTIME", "200", None),
        ("KMP_BLOCKTIME", "infinite", "warning"),
        ("GLOO_DEVICE_TRANSPORT", "TCP_TLS", "warning"),
        ("GLOO_DEVICE_TRANSPORT", "TCP", None),
        ("MASTER_ADDR", "127.0.0.1", "note"),
        ("MASTER_ADDR", "no-such-host.invalid", "warning"),
    ],
)
def test_a_variable_that_surprises_is_named(name, value, level, monkeypatch):
    monkeypatch.setattr(environment, "visible_gpus", lambda: 0)
    found = [(line.check, line.level) for line in environment.check({name: value}.get, [name])]
    assert found == ([("variables", "ok")] if level is None else [(name, level)])


def test_whatever_else_is_set_for_a_library_is_told_together():
    made = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "OMP_PLACES": "cores", "NCCL_DEBUG": "WARN", "HOME": "/root"}
    lines = list(environment.check(made.get, made))
    assert levels(lines) == [("NCCL_*", "note"), ("OMP_*", "note")]
    assert lines[0].text == "NCCL_ALGO=Ring, NCCL_PROTO=LL"
    assert lines[0].fix == "unset NCCL_ALGO NCCL_PROTO"


def test_libraries_that_stand_before_torchs_own_are_named(tmp_path):
    (tmp_path / "libnccl.so.2").touch()
    (tmp_path / "libpng.so").touch()
    (line,) = environment.check({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}.get, [])
    assert line.text == f"{tmp_path} holds libnccl.so.2"
    assert line.fix == "export LD_LIBRARY_PATH=/nowhere"


@pytest.mark.parametrize(("visible", "level"), [(2, "note"), (1, "warning"), (0, "note")])
def test_gpus_that_a_variable_hides_are_counted(visible, level, monkeypatch):
    monkeypatch.setattr(environment, "visible_gpus", lambda: visible)
    (line,) = environment.check({"CUDA_VISIBLE_DEVICES": "0,1"}.get, [])
    assert line.level == level


# --- GPUs: as nvidia-smi prints them; no GPU was to be had -----------------------------------------

CARDS = """\
0, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default, GPU-a0, 9.0
1, NVIDIA H100 80GB HBM3, 81559, 70123, 550.54.15, Default, GPU-b1, 9.0
2, NVIDIA A100-SXM4-40GB, 40960, 4, 550.54.15, Prohibited, GPU-c2, 8.0
"""
JOINED = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tPXB\t0-47\t0
GPU1\tNV18\t X \tSYS\t0-47\t0
NIC0\tPXB\tSYS\t X
"""


def test_gpus_in_use_closed_or_unlike_are_named():
    users = gpus.read_users("GPU-b1, 4242, python, 70000 MiB\nGPU-c2, 77, /bin/a, b, 12 MiB\nNo running processes")
    lines = list(gpus.judge(gpus.read_cards(CARDS), users))
    assert [level for _, level in levels(lines)] == ["note", "warning", "ok", "error"]
    assert lines[0].text == "1 x NVIDIA A100-SXM4-40GB, 2 x NVIDIA H100 80GB HBM3, driver 550.54.15"
    assert lines[0].fix == "export CUDA_VISIBLE_DEVICES=0,1"
    assert lines[1].text == "GPU 1 holds 73.5 GB already; 4242 python (70000 MiB)"
    assert lines[1].fix == "export CUDA_VISIBLE_DEVICES=0,2"
    assert lines[2].text == "GPU 2: 77 /bin/a, b (12 MiB)"
    (_, alone) = gpus.judge(gpus.read_cards(CARDS.splitlines()[1]), users)
    assert alone.fix == "kill 4242  # if they are yours, and no longer wanted"
    alike = list(gpus.judge(gpus.read_cards(CARDS.splitlines()[0]), []))
    assert levels(alike) == [("GPUs", "ok")]


def test_how_gpus_are_joined_is_told():
    (line,) = gpus.topology(JOINED, 2)
    assert line.text == "NVLink (NV18: nvidia-smi topo -m)"
    (line,) = gpus.topology(JOINED.replace("NV18", "SYS"), 2)
    assert line.text.startswith("some only across sockets")


# --- the trial ---------------------------------------------------------------------------------

BUILD = {"torch": "2.13.0", "cuda": None, "nccl": None, "mpi": False, "openmp": "OpenMP 4.5", "threads": 1}
RIGHT = {"right": True, "seconds": 0.002, "ranks": 2, **BUILD}


def test_backends_without_a_step_are_errors():
    steps = [{"backend": "gloo", **RIGHT}]
    failures = {"samestep": "rank 1: RuntimeError: no", "nccl": "ended by SIGBUS"}
    lines = list(trial.judge({"gloo": 2, "samestep": 2, "nccl": 1}, steps, failures))
    assert [line.level for line in lines] == ["ok", "error", "error"]
    assert [line.text for line in lines] == ["2 ranks, right, 2.00 ms", "rank 1: RuntimeError: no", "ended by SIGBUS"]
    assert lines[2].fix.endswith(" run -n 1 -m samestep.doctor.step /dev/null nccl  # its whole traceback")


def test_what_stands_behind_a_backend_that_fails_is_taken_all_the_same(tmp_path, monkeypatch):
    def run(words, _):
        place, *backends = words[words.index(trial.PROGRAM) + 1 :]
        taken = [name for name in backends if name != "samestep"] if backends[0] != "samestep" else []
        Path(place).write_text("".join(json.dumps({"backend": name, **RIGHT}) + "\n" for name in taken[:1]))
        return "samestep cannot"

    monkeypatch.setattr(trial, "_said", run)
    lines = list(trial._run(tmp_path, {"gloo": 2, "samestep": 2, "nccl": 2}))
    assert [line.level for line in lines] == ["ok", "error", "ok", "ok"]
    assert lines[1].text == "samestep cannot"
    assert (
        lines[3].text == "gloo of 2.13.0, no NCCL, no MPI of its own: mpi4py carries it; OpenMP 4.5; 1 threads a rank"
    )


def test_one_gpu_is_one_rank_over_nccl_and_still_two_on_cpus(tmp_path, monkeypatch):
    started = []

    def run(words, _):
        place, *backends = words[words.index(trial.PROGRAM) + 1 :]
        ranks = int(words[words.index("-n") + 1])
        started.append((ranks, backends))
        steps = [{"backend": name, **RIGHT, "ranks": ranks} for name in backends]
        Path(place).write_text("".join(json.dumps(step) + "\n" for step in steps))
        return ""

    monkeypatch.setattr(trial, "_said", run)
    lines = list(trial._run(tmp_path, {"gloo": 2, "samestep": 2, "nccl": 1}))
    assert started == [(2, ["gloo", "samestep"]), (1, ["nccl"])]
    assert [line.text.partition(",")[0] for line in lines[:3]] == ["2 ranks", "2 ranks", "1 rank"]


@pytest.mark.parametrize(
    ("gpus", "cuda", "taken"), [(0, (12, 8), None), (1, (12, 8), 1), (4, (12, 8), 2), (2, (0,), None)]
)
def test_a_step_over_nccl_is_taken_where_torch_could(gpus, cuda, taken, monkeypatch):
    asked = {}
    monkeypatch.setattr(trial, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(trial, "cuda_of_torch", lambda: cuda)
    monkeypatch.setattr(trial, "_mpi", lambda _: [])
    monkeypatch.setattr(trial, "_run", lambda _, backends: asked.update(backends) or [])
    assert list(trial.check()) == []
    assert asked == {"gloo": 2, "samestep": 2} | ({} if taken is None else {"nccl": taken})


def test_processes_that_do_not_find_each_other_are_an_error():
    (line,) = trial.judge({"mpi": 2}, [{"backend": "mpi", **RIGHT, "ranks": 1}] * 2, {})
    assert line.text == "2 processes were started, and each finds itself in a world of 1"
    assert "install --force-reinstall mpi4py mpich" in line.fix


def test_a_wrong_gradient_is_an_error():
    (line,) = trial.judge({"gloo": 2}, [{"backend": "gloo", **RIGHT, "right": False}], {})
    assert (line.level, line.effect) == ("error", "replicas diverge silently")


def test_what_a_trial_wrote_is_read_up_to_a_torn_line(tmp_path):
    (tmp_path / "steps").write_text('{"backend": "gloo"}\n{"backe')
    assert trial.read_steps(tmp_path / "steps") == [{"backend": "gloo"}]
    assert trial.read_steps(tmp_path / "none") == []
