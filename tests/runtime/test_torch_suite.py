"""PyTorch's own tests of process groups, which ship inside torch, over ours: some always, all in `make prove`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "scripts" / "torch_suite.py"
SOME = (
    "test_all_reduce_sum or test_all_reduce_max_complex or test_all_reduce_coalesced_sum or test_sparse_all_reduce "
    "or test_broadcast or test_barrier_full or test_all_gather_object or test_isend or test_reduce_scatter_v "
    "or test_ddp_hook_parity or test_accumulate_gradients_no_sync or test_DistributedDataParallelCPU or new_subgroups"
)

pytestmark = pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need expecttest: pip has it")


def failures(*options, timeout):
    command = [sys.executable, str(SUITE), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert " passed" in done.stdout, done.stderr
    return done.returncode, done.stdout if done.returncode else ""


def test_some_of_pytorchs_tests_pass():
    assert failures("-k", SOME, timeout=280) == (0, "")


@pytest.mark.prove
@pytest.mark.timeout(4000)
def test_all_of_pytorchs_tests_pass_ten_times():
    assert failures("--repeat", "10", timeout=3900) == (0, "")


@pytest.mark.prove
@pytest.mark.timeout(1000)
def test_all_of_pytorchs_tests_pass_with_three_ranks():
    assert failures("--ranks", "3", timeout=900) == (0, "")
