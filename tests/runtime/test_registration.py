"""Whoever imports samestep may name the backend, whatever was imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

ORDERS = [
    "import samestep, torch; dist = torch.distributed",
    pytest.param("import torch, samestep; dist = torch.distributed", marks=pytest.mark.prove),
    pytest.param("import samestep, torch.distributed as dist", marks=pytest.mark.prove),
    pytest.param("import torch.distributed as dist, samestep", marks=pytest.mark.prove),
]


def finished(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("order", ORDERS)
def test_the_backend_is_known_after_both_imports_in_any_order_and_its_group_waits_until_somebody_wants_one(order):
    imported = "import sys; print('samestep.runtime.process_group.group' in sys.modules)"
    known = "print(dist.Backend('samestep'), dist.Backend.backend_capability['samestep'])"
    assert finished(f"{order}; {imported}; {known}") == ["False", "samestep", "['cpu']"]


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("samestep")
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""


def test_under_samestep_run_a_script_need_not_import_samestep(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "samestep [2.0, 2.0]" in done.stdout
