"""PyTorch's own tests of process groups, which ship inside torch, over ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "scripts" / "torch_suite.py"
SOME = "test_all_reduce_coalesced_sum or test_sparse_all_reduce_sum"
MORE = "test_barrier_full or test_isend_autograd or test_ddp_hook_parity_allreduce or test_DistributedDataParallelCPU"

pytestmark = pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need expecttest: pip has it")


MPICHS = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
DEBIANS = shutil.which("mpiexec.openmpi")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SOME_OVER_MPI = (
    "test_all_reduce_sum or test_broadcast_full or test_all_gather_object or test_isend or test_send_recv_any_source "
    "or test_accumulate_gradients_no_sync or test_DistributedDataParallelCPU or test_barrier_full or test_batch_isend"
)
needs_mpi4py = pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py: pip install 'samestep[mpi]'")


def failures(*options, timeout):
    command = [sys.executable, str(SUITE), *options]
    environment = {**os.environ, **AS_ROOT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    assert " passed" in done.stdout, done.stderr
    return done.returncode, done.stdout if done.returncode else ""


@pytest.mark.prove
@pytest.mark.parametrize("some", [SOME, MORE])
def test_some_of_pytorchs_tests_pass(some):
    assert failures("-k", some, timeout=280) == (0, "")


@pytest.mark.prove
@pytest.mark.timeout(4000)
def test_all_of_pytorchs_tests_pass_ten_times():
    assert failures("--repeat", "10", timeout=3900) == (0, "")


@pytest.mark.prove
@pytest.mark.timeout(1000)
def test_all_of_pytorchs_tests_pass_with_three_ranks():
    assert failures("--ranks", "3", timeout=900) == (0, "")


@pytest.mark.prove
@needs_mpi4py
@pytest.mark.skipif(MPICHS is None, reason="no mpiexec beside this Python: pip install mpich brings one")
def test_some_of_pytorchs_tests_pass_over_mpi():
    assert failures("--backend", "mpi", "-k", SOME_OVER_MPI, timeout=280) == (0, "")


@pytest.mark.prove
@needs_mpi4py
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("chosen", ["gloo", "mpi"])
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize(
    "mpiexec", [MPICHS, DEBIANS and f"{DEBIANS} --oversubscribe --bind-to none"], ids=["mpich", "openmpi"]
)
def test_all_of_pytorchs_tests_pass_over_mpi(mpiexec, ranks, chosen):
    if mpiexec is None:
        pytest.skip("no such mpiexec here: pip install mpich, or apt-get install openmpi-bin")
    options = ("--mpiexec", mpiexec, "--ranks", ranks, "--chosen", chosen)
    assert failures("--backend", "mpi", *options, timeout=1900) == (0, "")
