"""PyTorch's own tests of process groups over MPI."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch_suites import failures

SOME = (
    "test_all_reduce_sum or test_broadcast_full or test_all_gather_object or test_isend or test_send_recv_any_source "
    "or test_accumulate_gradients_no_sync or test_DistributedDataParallelCPU or test_barrier_full or test_batch_isend"
)
MPICHS = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
DEBIANS = shutil.which("mpiexec.openmpi")

pytestmark = [
    pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need expecttest: pip has it"),
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py: pip install 'samestep[mpi]'"),
]


@pytest.mark.prove
@pytest.mark.skipif(MPICHS is None, reason="no mpiexec beside this Python: pip install mpich brings one")
def test_some_of_pytorchs_tests_pass_over_mpi():
    assert failures("--backend", "mpi", "-k", SOME, timeout=280) == (0, "")


@pytest.mark.prove
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
