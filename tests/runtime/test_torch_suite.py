"""PyTorch's own tests of process groups, which ship inside torch, over ours."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from torch_suites import failures

SOME = "test_all_reduce_coalesced_sum or test_sparse_all_reduce_sum"
MORE = "test_barrier_full or test_isend_autograd or test_ddp_hook_parity_allreduce or test_DistributedDataParallelCPU"

pytestmark = pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need expecttest: pip has it")


@pytest.mark.prove
@pytest.mark.parametrize("some", [SOME, MORE])
def test_some_of_pytorchs_tests_pass(some):
    assert failures("-k", some, timeout=280) == (0, "")


@pytest.mark.prove
@pytest.mark.timeout(2000)
def test_all_of_pytorchs_tests_pass_three_times():
    assert failures("--repeat", "3", timeout=1900) == (0, "")


@pytest.mark.prove
@pytest.mark.timeout(1000)
def test_all_of_pytorchs_tests_pass_with_three_ranks():
    assert failures("--ranks", "3", timeout=900) == (0, "")
