"""PyTorch's own tests of process groups over MPI."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

import pytest
from mpi_jobs import launcher
from torch_suites import failures

SOME = (
    "test_all_reduce_sum or test_broadcast_full or test_all_gather_object or test_isend or test_send_recv_any_source "
    "or test_accumulate_gradients_no_sync or test_DistributedDataParallelCPU or test_barrier_full or test_batch_isend"
)

pytestmark = pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need expecttest: pip has it")


def failures_under(library, *options, timeout):
    return failures("--backend", "mpi", "--mpiexec", shlex.join(launcher(library)), *options, timeout=timeout)


@pytest.mark.prove
def test_some_of_pytorchs_tests_pass_over_mpi():
    assert failures_under("mpich", "-k", SOME, timeout=280) == (0, "")


@pytest.mark.prove
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("chosen", ["gloo", "mpi"])
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_all_of_pytorchs_tests_pass_over_mpi(library, ranks, chosen):
    assert failures_under(library, "--ranks", ranks, "--chosen", chosen, timeout=1900) == (0, "")
