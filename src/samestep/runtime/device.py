"""Which device this rank owns, by its local rank *and* by the GPUs that it can see.

`torch.device("cuda", local_rank)` is right only while every process sees all GPUs of its host. Slurm's
--gpus-per-task, container runtimes and CUDA_VISIBLE_DEVICES show each process its own, and that one is number 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from samestep.errors import DeviceError


def default_device(local_rank: int, local_size: int, *, visible: int | None = None) -> torch.device:
    """Returns the device of the rank that is number `local_rank` of `local_size` on its host."""
    count = torch.cuda.device_count() if visible is None else visible
    if count == 0:
        return torch.device("cpu")
    if count >= local_size:
        return torch.device("cuda", local_rank)
    if count == 1:  # perhaps each rank sees another one; check_no_shared_gpu finds out
        return torch.device("cuda", 0)
    raise DeviceError(
        f"{local_size} ranks on this host see {count} GPUs: one process owns one GPU, so start {count} ranks here "
        f"(samestep run -n {count}), or train on the CPU with device='cpu'"
    )


def choose_device(requested: torch.device | None, local_rank: int, local_size: int) -> torch.device:
    """Returns the device requested, with its number, or else the rank's default."""
    if requested is None:
        return default_device(local_rank, local_size)
    if requested.type != "cuda":
        return requested
    visible = torch.cuda.device_count()
    if (requested.index or 0) >= visible:
        raise DeviceError(
            f"device {str(requested)!r} was asked for, but this process sees {visible} GPUs: is this a CUDA build of "
            "torch, and what does CUDA_VISIBLE_DEVICES say?"
        )
    return default_device(local_rank, local_size) if requested.index is None else requested


def gpu_uuid(device: torch.device) -> str | None:
    """Returns a name that two processes share only if they use the same card, or None on the CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def check_no_shared_gpu(holders: Sequence[tuple[int, str, str | None]]) -> None:
    """Raises DeviceError if two ranks use one card; `holders` are (rank, machine, card), in rank order."""
    seen: dict[tuple[str, str], int] = {}
    for rank, machine, card in holders:
        if card is None:
            continue
        first = seen.setdefault((machine, card), rank)
        if first != rank:
            raise DeviceError(
                f"ranks {first} and {rank} hold the same GPU ({card}): NCCL deadlocks when two processes share one "
                "card, each waiting for the other's kernel to leave. Start one rank per GPU, or check "
                "CUDA_VISIBLE_DEVICES and LOCAL_RANK; backend='gloo' can share one"
            )


def message_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Returns where a message between two ranks must lie: gloo sends from host memory alone, and to it."""
    if device.type != "cuda" or group is None:
        return device
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


def set_current_device(device: torch.device) -> torch.device:
    """Makes `device` this process's current one, so that bare `cuda` means it too."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
