"""Which backend carries the collectives, as a table in which every row has its reason.

torch.distributed takes a name and fails later, in C++, where it does not fit. Here what was asked for wins, unless
it is impossible, and then the error says why.

Source of the rules: PyTorch's "Which backend to use?" in the documentation of torch.distributed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import BackendError
from samestep.runtime.mpi.library import check_installed

__all__: list[str] = []


@dataclass(frozen=True)
class Rule:
    """Where tensors live and what joins the hosts decide the backend."""

    device: str
    interconnect: str
    backend: str
    reason: str


RULES = (
    Rule("cuda", "one host", "nccl", "copies between GPUs directly, over NVLink or PCIe, beside the computation"),
    Rule("cuda", "infiniband", "nccl", "the only backend with GPUDirect: the card reads the GPU's memory itself"),
    Rule("cuda", "ethernet", "nccl", "still the fastest for GPU tensors; gloo would stage every byte on the host"),
    Rule("cpu", "one host", "gloo", "always built in, full set of collectives, no set-up"),
    Rule("cpu", "infiniband", "gloo", "over IP on InfiniBand; 'mpi' uses verbs and is faster where you have it"),
    Rule("cpu", "ethernet", "gloo", "TCP is what it was written for"),
)


def interconnect(*, one_host: bool, sys_class: Path = Path("/sys/class")) -> str:
    """Returns what joins the ranks: "one host", "infiniband" or "ethernet"."""
    if one_host:
        return "one host"
    adapters = sys_class / "infiniband"
    return "infiniband" if adapters.is_dir() and any(adapters.iterdir()) else "ethernet"


def rule_for(device_type: str, between: str) -> Rule:
    """Returns the row of the table for tensors on `device_type` and hosts joined by `between`."""
    for rule in RULES:
        if (rule.device, rule.interconnect) == (device_type, between):
            return rule
    raise BackendError(f"no backend is known for {device_type} tensors; samestep trains on cpu and cuda")


def choose_backend(asked: str | None, device: torch.device, *, one_host: bool) -> str:
    """Returns the backend to use: what was asked for if it is possible, else the table's.

    Raises:
        BackendError: the backend is unknown, not built into this torch, or cannot serve `device`.
    """
    if asked is None:
        return rule_for(device.type, interconnect(one_host=one_host)).backend
    name = asked.lower()
    _check_known(name)
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


def _check_known(name: str) -> None:
    if name in dist.Backend.backend_list:
        return
    close = difflib.get_close_matches(name, dist.Backend.backend_list, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(dist.Backend.backend_list)}"
    raise BackendError(f"unknown backend {name!r}{hint}")


def _check_built(name: str) -> None:
    built = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    if name == "mpi" and not dist.is_mpi_available():
        check_installed()  # mpi4py carries it
        return
    if name in built and not built[name]():
        remedy = {
            "nccl": "install a CUDA build of torch",
        }.get(name, "use 'gloo'")
        raise BackendError(f"backend {name!r} is not built into torch {torch.__version__}: {remedy}")


def group_backend(name: str, device: torch.device) -> str:
    """Returns the spelling for `init_process_group`: with CUDA, host tensors keep a backend too."""
    if name == "mpi":
        return spelled(name)
    return "cpu:gloo,cuda:nccl" if name == "nccl" and device.type == "cuda" else name


def spelled(name: str) -> str:
    """Returns another spelling of a backend for tensors of all devices.

    Told "mpi" alone, torch.distributed neither takes rank and size from its caller, nor keeps a store for other groups,
    nor lets some ranks make a group by themselves.
    """
    return f"cpu:{name},cuda:{name}"


def number_collectives(backend: Any) -> None:
    """Has a new group of gloo's or NCCL's count its collectives, as torch.distributed does; from 2.14 on all do."""
    if torch.__version__ < "2.14":  # a TorchVersion, which compares as one; later ones only warn of the call
        backend._set_sequence_number_for_group()  # noqa: SLF001
