"""`samestep.world(backend="mpi")`, `--mpi`, the examples, and what a device mesh of two backends does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_jobs import mpiexec

from ports import free_port
from samestep.cli import main

HELLO = Path(__file__).parents[2] / "examples" / "mpi_hello.py"
SAMESTEP = [sys.executable, "-P", "-m", "samestep"]

WORLD = """
import torch, torch.distributed as dist, samestep
from samestep.runtime import hosts
from samestep.runtime.axis import HostMap

with samestep.world(backend="mpi") as world:
    print(world, dist.get_backend())
    x = torch.full((3,), world.rank + 1.0)
    ends = world.group([0, 2])
    if ends is not None:
        dist.all_reduce(x, group=ends)
    print("sum", x.tolist())
    world.data.host_map = HostMap(hosts=((0,), (1,), (2,)), processes=world.data.host_map.processes)
    across = hosts.inter_host_group(world.data)
    dist.all_reduce(x, group=across)
    print("across", x.tolist(), dist.get_backend(across))
"""

TRAIN = """
import torch, samestep
with samestep.world(backend="mpi") as world:
    model = samestep.replicate(torch.nn.Linear(4, 2), world, reduce="gloo")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4))
    batches = samestep.shards(data, world, batch_size=4, shuffle=False)
    for (x,) in batches:
        loss = batches.mean(model(x).square().mean(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if world.is_first:
        print(model.module.weight.tolist())
"""

COMPRESSED = """
import torch, samestep
from samestep.runtime.digest import digest
with samestep.world(backend="mpi") as world:
    for codec in ("int8", "topk", "powersgd"):
        torch.manual_seed(0)
        layers = torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 300)
        model = samestep.replicate(torch.nn.Sequential(*layers), world, compress=codec, buckets=0.2)
        for step in range(3):
            x = torch.randn(8, 100, generator=torch.Generator().manual_seed(10 * step + world.rank))
            model(x).square().mean().backward()
        print(codec, *map(digest, (parameter.grad for parameter in model.parameters())))
"""

TWO_BACKENDS = """
import os, sys, torch, torch.distributed as dist, samestep
os.environ.update(RANK=os.environ["PMI_RANK"], WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
dist.init_process_group("cpu:gloo,cuda:mpi")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
rows = [torch.zeros(3) for _ in range(dist.get_world_size())]
dist.all_gather(rows, x)
part = torch.zeros(3)
dist.scatter(part, rows if dist.get_rank() == 0 else None)
got = torch.zeros(3)
if dist.get_rank() < 2:
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(got, 0)
for ranks in ([1, 2], [0, 1], [2, 0]):
    pair = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        dist.all_reduce(x, group=pair)
group = dist.group.WORLD
names = type(group).__name__, dist.get_backend_config(), group.others["cpu"]._get_backend_name()
print(dist.get_rank(), names[0], x.tolist(), *names[1:])
"""


def job(folder, library, text, count):
    (folder / "train.py").write_text(text)
    done = mpiexec(library, count, sys.executable, "train.py", folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_world_over_mpi_has_groups_and_may_span_hosts(tmp_path):
    said = job(tmp_path, "mpich", WORLD, 3)
    assert said.count("(rank 1 of 3, cpu, mpi) mpi") == 1
    assert said.count("sum [4.0, 4.0, 4.0]") == 2
    assert said.count("across [10.0, 10.0, 10.0] mpi") == 3


def test_a_world_over_mpi_takes_the_steps_of_one_process(tmp_path):
    from torch import tensor
    from torch.testing import assert_close

    ranks, alone = (job(tmp_path, "mpich", TRAIN, count) for count in (2, 1))
    assert_close(tensor(eval(ranks)), tensor(eval(alone)))


@pytest.mark.prove
def test_compressed_gradients_have_the_same_bits_over_mpi_and_over_gloo(tmp_path):
    over_mpi = job(tmp_path, "mpich", COMPRESSED, 2).splitlines()
    over_gloo = job(tmp_path, "mpich", COMPRESSED.replace('"mpi"', '"gloo"'), 2).splitlines()
    assert len(over_mpi) == 6
    assert sorted(over_mpi) == sorted(over_gloo)


def test_another_backend_serves_the_tensors_of_another_device(tmp_path):
    (tmp_path / "train.py").write_text(TWO_BACKENDS)
    done = mpiexec("mpich", 3, sys.executable, "train.py", free_port(), folder=tmp_path)
    sums = [30.0, 18.0, 30.0]  # 6, 6, 6; then 6, 12, 12; then 18, 18, 12
    said = [f"{rank} MpiGroup {[sum_] * 3} cpu:gloo,cuda:mpi gloo" for rank, sum_ in enumerate(sums)]
    assert sorted(done.stdout.splitlines()) == said, done.stderr


def samestep(*words, **extra):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "MPI", "OMPI", "SAMESTEP"))}
    return subprocess.run(
        [*SAMESTEP, *map(str, words)], env={**own, **extra}, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.prove
def test_hello_is_said_and_sent_and_received(tmp_path):
    mpiexec("mpich", 1, "true")  # skips where it is missing
    done = samestep("run", "--mpi", "-n", "2", "--run-dir", tmp_path / "run", HELLO)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] hello from rank 0 of 2",
        "[rank 0] rank 0 has 1",
        "[rank 1] hello from rank 1 of 2",
        "[rank 1] rank 1 has 1",
    ]


SYNCHRONISED = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("mpi")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    (model(x) - y).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_verify_finds_the_training_over_mpi_to_be_that_of_one_process(tmp_path):
    mpiexec("mpich", 1, "true")
    (tmp_path / "train.py").write_text(SYNCHRONISED)
    done = samestep("verify", "--mpi", "--steps", "3", tmp_path / "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same training (2 ranks, 3 steps compared)" in done.stdout


def test_the_command_for_mpiexec_is_shown(capsys):
    mpiexec("mpich", 1, "true")
    with pytest.raises(SystemExit, match="^0$"):
        main(["run", "--mpi", "--dry-run", "-n", "3", "--check", str(HELLO), "-n", "9"])
    shown = capsys.readouterr().out
    assert shown.split()[1:3] == ["-n", "3"]
    assert shown.split("samestep run ")[1] == f"--check {HELLO} -n 9\n"


def test_mpi_within_mpi_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main(["run", "--mpi", "-n", "2", str(HELLO)]) == 2
    assert "an mpiexec has started this process already: leave out either it or --mpi" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["-n", "2", "--hosts", "a,b"], ["-n", "2", "--slurm"]])
def test_what_mpiexec_cannot_do_alone_is_refused(words, capsys):
    assert main(["run", "--mpi", *words, str(HELLO)]) == 2
    assert "--mpi has the mpiexec of this machine start the ranks, so many as -n says" in capsys.readouterr().err


@pytest.mark.prove
def test_ranks_that_end_one_after_another_are_no_failure_to_mpiexec(tmp_path):
    text = "import torch.distributed as dist\ndist.init_process_group('mpi')\ndist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(text)
    for _ in range(3):  # it was one, 3 times of 7
        done = mpiexec("mpich", 3, *SAMESTEP, "run", "train.py", folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
