"""The programs of examples/gpu, unchanged, on fake GPUs, by the commands in their docstrings."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "examples" / "gpu"
SAID = {
    "launch_local_rank.py": r"epoch 2: mean loss 0\.\d+ on 2 GPUs",
    "spawn_per_gpu.py": r"rank 1 of 2 on fake GPU of samestep 1: mean loss",
    "two_devices_a_process.py": r"rank 1 on cuda:2 and cuda:3: same weights as the others: True",
    "mixed_precision.py": r"logits in torch.float16; loss 2\.\d\d at first, [01]\.\d\d at last",
    "two_devices_two_streams.py": r"in parts of 20 the weights are at most \d\.\de-0[6-9] from the whole",
    "several_gpus_one_process.py": r"3 GPUs in one process: the weights are at most (\d\.\de-1[5-8]|0\.0e\+00)",
    "gradients_by_hand.py": r"3 ranks hold the same 2,410 weights: True; 2 in the group",
}
PROVED = {"spawn_per_gpu.py"}  # starts interpreters


def command_of(name: str) -> list[str]:
    text = ast.get_docstring(ast.parse((FOLDER / name).read_text(encoding="utf-8"))) or ""
    line = re.search(r"^samestep (run .*)$", text, re.MULTILINE)
    assert line is not None, f"{name} has no command"
    words = shlex.split(line[1])
    return [str(FOLDER / Path(word).name) if word.startswith("examples/") else word for word in words]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove) if name in PROVED else name for name in SAID]
)
def test_an_example_runs_on_fake_gpus(name: str, tmp_path: Path) -> None:
    run, *words = command_of(name)
    done = subprocess.run(
        [sys.executable, "-m", "samestep", run, "--start", "fork", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SAID[name], done.stdout), done.stdout
    assert "values are the CPU's, times and memory mean nothing" in done.stderr


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {*SAID, "data.py"}
