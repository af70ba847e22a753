"""The commands on the pages run as they stand, one page after the other in a folder with a script and a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_OUTPUT = {"start.md"}  # its commands are run by tests/test_site.py, which compares what they print
SHELLS = {"", "bash", "console", "sh", "shell"}  # the languages of their blocks
COMMAND = re.compile(r"(?:\w+=\S+ )*(?:samestep|torchrun|mpiexec|srun|python|pip|make|kubectl) ")
ELSEWHERE = {  # pattern -> which test runs such a command
    r"--hosts|--hostfile|--nnodes": "tests/launch/test_hosts.py",
    r"^srun|--slurm": "tests/launch/test_slurm.py",
    r"^mpiexec -n 2 samestep doctor": "tests/launch/test_doctor_hosts.py",
    r"^kubectl": "tests/examples/test_clusters_and_ci.py",
    r"^pip ": "tests/test_package.py",
    r"^make (demo|test|prove|check|zoo)": "tests/recipes/test_demo.py",
    r"samestep bench": "tests/cli/test_bench.py",
    r"scripts/torch_suite.py": "tests/runtime/test_torch_suite.py",
    r"recipes.imagenet": "tests/recipes/test_imagenet.py",
    r"recipes.text": "tests/recipes/test_text.py",
    r"^samestep watch(?! --once)": "tests/reporting/test_watch_terminal.py",
    r"^mpiexec -n \d samestep run|^mpiexec -n \d python": "tests/launch/test_mpiexec.py",
    r"^samestep (run$|from)|SRC DST": "tests/test_documents.py",  # not commands: a table, a sentence, a synopsis
}
SCRIPT = """
    import argparse, os
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # python train.py
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, generator=draw)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 24 // size, sampler=sampler)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), options.lr)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
    dist.destroy_process_group()
"""


def commands(page: Path) -> list[str]:
    """Returns those of the blocks of a page, without comments; the page of commands has them behind two blanks."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for kind, each in blocks if kind in SHELLS for line in each.splitlines()]
    comment = r"\s{2,}" if page.name in {"commands.md", "structure.md"} else r"\s+#"
    found = [re.split(comment, line)[0].removesuffix("…").strip() for line in lines if COMMAND.match(line)]
    return [line for line in found if not line.startswith("samestep ran")]


def is_elsewhere(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in ELSEWHERE)


RUN_HERE = {
    page.name: found
    for page in PAGES
    if page.name not in WITH_OUTPUT and (found := [one for one in commands(page) if not is_elsewhere(one)])
}


def test_commands_that_are_not_run_here_have_another_test() -> None:
    for path in ELSEWHERE.values():
        assert (ROOT / path).exists(), path
    everything = [one for page in PAGES for one in commands(page)]
    for pattern in ELSEWHERE:
        assert any(re.search(pattern, one) for one in everything), f"no page has a command like {pattern}"


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    about = {"cwd": folder, "env": {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}}
    return subprocess.run(["bash", "-c", command], **about, capture_output=True, text=True, timeout=280, check=False)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages take for granted: a script, a package, a cluster, a run and its checkpoints."""
    folder = tmp_path_factory.mktemp("work")
    for path in ("train.py", "package/train.py", "package/module.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    for name in ("examples", "zoo"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("runs", "__pycache__", "blind"))
    (cluster,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/plan.md").read_text(encoding="utf-8"), re.DOTALL)
    for name in ("cluster.toml", "big.toml"):
        (folder / name).write_text(cluster, encoding="utf-8")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "old.pt")
    digits = "samestep run -n 2 -m samestep.recipes.digits --epochs 2 --checkpoint runs/digits"
    for command in (digits, "samestep run -n 4 train.py"):
        assert shell(command, folder).returncode == 0
    return folder


def as_here(command: str, folder: Path) -> str:
    """Puts the run and the checkpoint of this folder where a page names another."""
    newest = max((folder / "runs").glob("train-*"), key=lambda path: path.stat().st_mtime)
    saved = next((folder / "runs" / "digits").glob("step-*[0-9]"))
    command = re.sub(r"runs/train-\d+-\d+-\w+|RUN_DIR", f"runs/{newest.name}", command)
    return command.replace("step-00000120", saved.name).replace("jq .step", "python -m json.tool")


WRONG = ("zoo/loss-summed/buggy.py", "examples/moving/torchrun/before.py")  # as their pages say
CODES = {f"samestep verify {path}": {1} for path in WRONG}  # else 0; doctor looks at the machine that it finds


@pytest.mark.prove
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", RUN_HERE)
def test_the_commands_of_a_page_run(folder: Path, page: str) -> None:
    for command in RUN_HERE[page]:
        if "checkpoint convert" in command:  # nothing is written over
            target = folder / command.split()[4]
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True)
        done = shell(as_here(command, folder), folder)
        expected = {0, 1} if "doctor" in command else CODES.get(command, {0})
        assert done.returncode in expected, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
