"""The manifests for Kubernetes, the workflow for GitHub and the test for pytest: what their commands do."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from ports import free_port
from samestep.rankenv import fresh_environment

ROOT = Path(__file__).parent.parent.parent
EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"
PROGRAM = f"{shlex.quote(sys.executable)} -m samestep "
TOKEN = "0123456789abcdef"

FOR_GPUS = """
    import argparse, os
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    options = parser.parse_args()
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(16, 3))
    sampler = DistributedSampler(data)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8 // torch.distributed.get_world_size(), sampler=sampler):
            optimizer.zero_grad()
            model(x.cuda()).square().mean().backward()
            optimizer.step()
    torch.distributed.destroy_process_group()
"""


def pods(name):
    """Returns the templates of a manifest's two pods, the first name and the variable that numbers them."""
    *_, found = yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text(encoding="utf-8"))
    if found["kind"] == "Job":
        assert found["spec"]["completions"] == found["spec"]["parallelism"] == 2
        return [found["spec"]["template"]] * 2, "train-0.train", "JOB_COMPLETION_INDEX"
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert [replicas[each]["replicas"] for each in ("Master", "Worker")] == [1, 1]
    return [replicas[each]["template"] for each in ("Master", "Worker")], "train-master-0", "RANK"


def started(pod, first, port, more=""):
    """Returns a container's command on this host; the first pod's name becomes an address."""
    (container,) = pod["spec"]["containers"]
    assert container["env"][0]["name"] == "SAMESTEP_TOKEN"
    assert container["volumeMounts"][0]["mountPath"] == "/dev/shm"
    *shell, text = container["command"]
    assert shell == ["sh", "-c"]
    assert text.count(first) == 2
    text = text.replace(f"{first}:29500", f"127.0.0.1:{port}").replace(first, "127.0.0.1").replace(" -n 4", " -n 1")
    return [*shell, text.replace("exec samestep run ", f"exec {PROGRAM}run {more}")]


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml"])
def test_a_pod_s_command_has_options_that_run_takes(name, tmp_path):
    (tmp_path / "train.py").write_text("")
    templates, first, variable = pods(name)
    environment = fresh_environment() | {variable: "1", "SAMESTEP_TOKEN": TOKEN}
    command = started(templates[1], first, 29500, "--dry-run ")
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"\bGROUP_RANK=1\b", shown.stdout), shown.stdout


@pytest.mark.prove
@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml"])
def test_the_pods_of_a_manifest_are_one_run(name, tmp_path):
    script = 'import os\nprint("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])\n'
    (tmp_path / "train.py").write_text(script)
    (templates, first, variable), port = pods(name), free_port()

    def run(number):
        environment = fresh_environment() | {variable: str(number), "WORLD_SIZE": "2", "SAMESTEP_TOKEN": TOKEN}
        command = started(templates[number], first, port)
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        leader, other = pool.map(run, range(2))
    assert (leader.returncode, other.returncode) == (0, 0), leader.stderr + other.stderr
    assert {"[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"} <= set(leader.stdout.splitlines())


def test_the_page_shows_the_steps_of_the_workflow():
    workflow = (EXAMPLES / "ci" / "verify.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    (shown,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "ci.md").read_text(encoding="utf-8"), re.DOTALL)
    assert yaml.safe_load(shown) == job["steps"][-2:]


@pytest.mark.prove
def test_the_workflow_verifies_a_script_for_gpus(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(FOR_GPUS))
    (job,) = yaml.safe_load((EXAMPLES / "ci" / "verify.yml").read_text(encoding="utf-8"))["jobs"].values()
    command = next(step["run"] for step in job["steps"] if "samestep verify" in step.get("run", ""))
    command = command.replace("samestep ", PROGRAM, 1)
    environment = fresh_environment()
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same training" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.prove
def test_the_test_of_the_page_passes():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(EXAMPLES / "ci" / "test_training.py"),
    ]
    done = subprocess.run(command, env=fresh_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
