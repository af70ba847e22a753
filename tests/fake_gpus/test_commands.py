"""`--fake-gpus` of run and verify, SAMESTEP_FAKE_GPUS, and what is said where GPUs are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import fake_gpus
from samestep.cli import main, run, verify
from samestep.errors import UsageError
from samestep.fake_gpus.suggestion import suggest, wants_gpus
from samestep.launch.run import RunSpec, local_ranks
from samestep.paths import RunDirectory

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

device = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
sampler = DistributedSampler(data)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
if dist.get_world_size() > 1:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[device])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(data, batch_size=4, sampler=sampler, pin_memory=True):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
    loss.backward()
    optimizer.step()
print("on", loss.device, "of", torch.cuda.device_count())
dist.destroy_process_group()
"""


def samestep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = (sys.executable, "-m", "samestep", *words)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200)


def test_a_script_for_gpus_runs_without_any(tmp_path: Path) -> None:
    done = samestep(tmp_path, "run", "-n", "2", "--fake-gpus", "3", "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] on cuda:0 of 3", "[rank 1] on cuda:1 of 3"]
    assert "3 fake GPUs on each host: values are the CPU's, times and memory mean nothing" in done.stderr


def test_verify_judges_a_script_for_gpus(tmp_path: Path) -> None:
    """It synchronises BatchNorm on several ranks alone; one process has that of the whole batch all the same."""
    done = samestep(tmp_path, "verify", "--fake-gpus", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as declared" not in done.stdout
    assert "train.py: the same training (2 ranks" in done.stdout
    assert "2 fake GPUs on each host" in done.stderr


@pytest.mark.parametrize(("command", "code"), [("run", 1), ("verify", 3)])
def test_the_option_is_suggested_where_gpus_are_missing(tmp_path: Path, command: str, code: int) -> None:
    done = samestep(tmp_path, command, "-n", "2", "train.py")
    assert done.returncode == code
    told = f"the script wants GPUs, and this host has none: `samestep {command} --fake-gpus train.py` runs it"
    assert told in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Distributed package doesn't have NCCL built in",
        "RuntimeError: Found no NVIDIA driver on your system. Please check",
        "Unable to locate sufficient 2 gpus to run this example. Exiting.",
        "torch.AcceleratorError: CUDA error: invalid device ordinal",
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
    ],
)
def test_what_says_that_gpus_are_missing_is_known(text: str) -> None:
    assert wants_gpus(["nothing of the kind", text])
    assert not wants_gpus(["RuntimeError: CUDA out of memory", "KeyError: 'gpu'"])


def test_fewer_gpus_than_ranks_are_counted() -> None:
    assert "this host has 1 for 4 ranks: `samestep verify --fake-gpus a.py`" in suggest("verify", "a.py", 1, 4)


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize("number", ["0", "-1", "65"])
def test_a_number_that_is_none_is_refused(command: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--fake-gpus", number, "train.py"]) == 2
    assert f"N must be a number of GPUs from 1 to 64, not '{number}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "gpus", "program"),
    [
        (["--fake-gpus", "train.py", "2"], 0, ["train.py", "2"]),
        (["--fake-gpus", "2", "train.py"], 2, ["train.py"]),
        (["--fake-gpus=4", "train.py"], 4, ["train.py"]),
        (["-n", "2", "--fake-gpus", "-m", "train"], 0, ["train"]),
        (["-n", "2", "train.py", "--fake-gpus", "3"], None, ["train.py", "--fake-gpus", "3"]),
    ],
)
def test_the_number_may_be_left_out_and_a_script_may_have_the_option_too(
    words: list[str], gpus: int | None, program: list[str]
) -> None:
    for parser in (run._parser(), verify._parser()):
        options = parser.parse(words)
        assert (options.fake_gpus, options.program) == (gpus, program)


def test_each_rank_is_told_how_many_there_are(tmp_path: Path) -> None:
    def told(gpus: int | None) -> str | None:
        plan = RunSpec(
            parts=(local_ranks(3),),
            directory=RunDirectory(tmp_path),
            run_id="x",
            program="train.py",
            arguments=(),
            fake_gpus=gpus,
        )
        return plan.variables(1).get(fake_gpus.VARIABLE)

    assert [told(None), told(0), told(8)] == [None, "3", "8"]


def test_the_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fake_gpus.VARIABLE, raising=False)
    assert fake_gpus.requested() is None
    monkeypatch.setenv(fake_gpus.VARIABLE, "4")
    assert fake_gpus.requested() == 4
    monkeypatch.setenv(fake_gpus.VARIABLE, "many")
    with pytest.raises(UsageError, match="SAMESTEP_FAKE_GPUS must be a number of GPUs from 1 to 64, not 'many'"):
        fake_gpus.requested()


def test_what_is_said_before_a_run() -> None:
    assert fake_gpus.about_fake_gpus(0, 4, 0) == [
        "4 fake GPUs on each host: values are the CPU's, times and memory mean nothing"
    ]
    _, fewer, real = fake_gpus.about_fake_gpus(1, 2, 1)
    assert fewer == "note: 1 fake GPU for 2 ranks: NCCL refuses two ranks on one GPU, as on real ones"
    assert real == "note: this host has 1 real GPU, which will not be used"


@pytest.mark.prove
def test_other_launchers_run_it_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text("import sys, torch\nprint(torch.cuda.device_count(), sys.argv[1:], __name__)")
    environment = {**os.environ, fake_gpus.VARIABLE: "2"}
    words = [sys.executable, "-m", "samestep.fake_gpus", "count.py", "--lr", "1"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout == "2 ['--lr', '1'] __main__\n", done.stderr
