"""Which backend of torch.distributed carries the collectives: what was asked for, if it is possible.

torch.distributed takes a name and fails later, in C++, where it does not fit; here the error says why. By default
GPU tensors go over NCCL, on any network, and host tensors over gloo, which is always built in and has all collectives
(PyTorch's "Which backend to use?" in the documentation of torch.distributed).
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import BackendError
from samestep.runtime.mpi.library import check_installed


def choose_backend(requested: str | None, device: torch.device) -> str:
    """Returns the backend to use."""
    if requested is None:
        if device.type not in {"cpu", "cuda"}:
            raise BackendError(f"no backend is known for {device.type} tensors; samestep trains on cpu and cuda")
        return "nccl" if device.type == "cuda" else "gloo"
    name = requested.lower()
    if name not in dist.Backend.backend_list:
        close = difflib.get_close_matches(name, dist.Backend.backend_list, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(dist.Backend.backend_list)}"
        raise BackendError(f"unknown backend {name!r}{hint}")
    _check_built(name)
    if name == "nccl" and device.type != "cuda":
        raise BackendError(
            f"backend 'nccl' moves GPU tensors only, and this rank trains on {device}: ask for 'gloo', or leave it out"
        )
    if name == "samestep" and device.type != "cpu":
        raise BackendError(
            f"backend 'samestep' works in host memory, and this rank trains on {device}: pass device='cpu', "
            "or leave the backend out"
        )
    return name


def _check_built(name: str) -> None:
    built = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    if name not in built or built[name]():
        return
    if name == "mpi":
        check_installed()  # mpi4py carries it
        return
    fix = "install a CUDA build of torch" if name == "nccl" else "use 'gloo'"
    raise BackendError(f"backend {name!r} is not built into torch {torch.__version__}: {fix}")


def group_backend(name: str, device: torch.device) -> str:
    """Returns the spelling for `init_process_group`: with CUDA, host tensors keep a backend too."""
    if name == "mpi":
        return for_all_devices(name)
    return "cpu:gloo,cuda:nccl" if name == "nccl" and device.type == "cuda" else name


def for_all_devices(name: str) -> str:
    """Returns the spelling of a backend that names the devices.

    Given "mpi" alone, torch.distributed neither takes rank and size from its caller, nor keeps a store for other
    groups, nor lets some ranks make a group by themselves.
    """
    return f"cpu:{name},cuda:{name}"


def number_collectives(backend: Any) -> None:
    """Makes a new group of gloo's or NCCL's count its collectives, as torch.distributed does; from 2.14 on all do."""
    if torch.__version__ < "2.14":  # a TorchVersion, which compares as one; later ones only warn of the call
        backend._set_sequence_number_for_group()  # noqa: SLF001
