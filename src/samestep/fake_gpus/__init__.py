"""Fake GPUs: a script that is written for CUDA and NCCL runs on a computer that has neither.

Tensors "on" a fake GPU lie in host memory and say that they are on `cuda:k`; operators run their CPU kernels. What a
GPU refuses is refused with PyTorch's own exceptions. docs/fake-gpus.md lists what is faked and how strictly.

    host_memory   a tensor's device, without moving its bytes        kernels   every operator, and mixed devices
    native        what C++ asks about CUDA                           cuda      what torch.cuda asks C++ for
    devices       how many, CUDA_VISIBLE_DEVICES, forks              streams   streams and events
    generators    random numbers with the state of CUDA's            groups    NCCL
    loading       storages, pinned memory, other processes           models    LSTM, GRU, DataParallel, SyncBatchNorm

This package is imported only where fake GPUs are asked for; importing it changes nothing, :func:`install` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.errors import UsageError
from samestep.rankenv import variable

__all__ = ["VARIABLE", "about_fake_gpus", "install", "made", "number", "requested"]

VARIABLE = "SAMESTEP_FAKE_GPUS"
LARGEST = 64  # what torch.cuda reads of CUDA_VISIBLE_DEVICES


def requested() -> int | None:
    """Returns how many fake GPUs the environment asks for, or None.

    Raises:
        UsageError: it asks for no number of GPUs.
    """
    text = variable(VARIABLE)
    return None if not text else number(text, VARIABLE)


def number(text: str, option: str) -> int:
    """Returns the number of fake GPUs that a text gives.

    Raises:
        UsageError: it is not a number from 1 to 64.
    """
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise UsageError(f"{option} must be a number of GPUs from 1 to {LARGEST}, not {text!r}")
    return int(text)


def install(gpus: int) -> None:
    """Makes so many fake GPUs; once they are there, the same number again changes nothing.

    Args:
        gpus: of this host.

    Raises:
        UsageError: there are others already, or PyTorch has begun to use a real one.
        RuntimeError: this build of PyTorch cannot have any.
    """
    from samestep.fake_gpus import installing

    installing.install(gpus)


def about_fake_gpus(gpus: int, ranks: int, real: int) -> list[str]:
    """Returns what a command says before it runs a script on fake GPUs.

    Args:
        gpus: of each host; 0 for one for each rank.
        ranks: most of a host.
        real: how many GPUs there really are.

    Example:
        >>> about_fake_gpus(2, 2, 0)[0]
        "2 fake GPUs on each host: values are the CPU's, times and memory mean nothing"
    """
    gpus = gpus or ranks
    what = "1 fake GPU" if gpus == 1 else f"{gpus} fake GPUs"
    lines = [f"{what} on each host: values are the CPU's, times and memory mean nothing"]
    if gpus < ranks:
        lines.append(f"note: {what} for {ranks} ranks: NCCL refuses two ranks on one GPU, as on real ones")
    if real:
        lines.append(f"note: this host has {real} real GPU{'s' * (real > 1)}, which will not be used")
    return lines


@contextmanager
def made(gpus: int) -> Iterator[None]:
    """Makes so many fake GPUs for a while; tensors on them must not be used any more afterwards.

    Raises:
        UsageError: `gpus` is not from 1 to 64, there are some already, or PyTorch has begun to use a real one.
    """
    from samestep.fake_gpus import devices, installing

    gpus = number(str(gpus), "n")
    if devices.DEVICES.total:
        raise UsageError(f"there are {devices.DEVICES.total} fake GPUs in this process already")
    installing.install(gpus)
    try:
        yield
    finally:
        installing.remove()
