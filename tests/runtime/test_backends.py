import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import samestep  # noqa: F401  (registers a backend)
from samestep.errors import BackendError
from samestep.runtime.backends import choose_backend, group_backend, number_collectives
from samestep.runtime.mpi import library

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_by_default_gloo_serves_host_tensors_and_nccl_those_of_a_gpu():
    assert choose_backend(None, CPU) == "gloo"
    assert choose_backend(None, GPU) == "nccl"
    with pytest.raises(BackendError, match="no backend is known for xpu tensors; samestep trains on cpu and cuda"):
        choose_backend(None, torch.device("xpu"))


def test_what_is_asked_for_wins_where_it_is_possible():
    assert choose_backend("gloo", GPU) == "gloo"


def test_an_unknown_backend_is_refused_with_the_nearest_known():
    with pytest.raises(BackendError, match="unknown backend 'glo'; did you mean 'gloo'"):
        choose_backend("glo", CPU)


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch was built with MPI")
def test_mpi_needs_mpi4py_and_no_other_pytorch(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=re.escape("backend 'mpi' needs mpi4py: pip install 'samestep[mpi]'")):
        choose_backend("mpi", CPU)
    monkeypatch.setattr(library, "find_spec", lambda name: name)
    assert choose_backend("mpi", CPU) == choose_backend("mpi", GPU) == "mpi"


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_without_a_cuda_build_is_refused():
    with pytest.raises(BackendError, match="'nccl' is not built into torch.*CUDA build"):
        choose_backend("nccl", CPU)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_on_the_cpu_is_refused_with_the_reason():
    with pytest.raises(BackendError, match="moves GPU tensors only"):
        choose_backend("nccl", CPU)


def test_the_backend_of_our_own_is_for_host_tensors():
    assert choose_backend("samestep", CPU) == "samestep"
    with pytest.raises(BackendError, match="works in host memory, and this rank trains on cuda:0: pass device='cpu'"):
        choose_backend("samestep", GPU)


def test_host_tensors_keep_a_backend_beside_nccl():
    assert group_backend("nccl", GPU) == "cpu:gloo,cuda:nccl"
    assert group_backend("gloo", CPU) == "gloo"


@pytest.mark.parametrize(("release", "is_called"), [("2.11.0+cu130", True), ("2.13.0", True), ("2.14.1+cpu", False)])
def test_collectives_are_numbered_by_a_call_that_later_releases_warn_of(monkeypatch, release, is_called):
    calls = []
    monkeypatch.setattr(torch, "__version__", TorchVersion(release))
    number_collectives(SimpleNamespace(_set_sequence_number_for_group=lambda: calls.append(release)))
    assert bool(calls) == is_called
