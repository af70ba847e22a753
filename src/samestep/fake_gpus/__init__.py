"""Fake GPUs: a script that is written for CUDA and NCCL runs on a computer that has neither.

Tensors "on" a fake GPU lie in host memory and say that they are on `cuda:k`; operators run their CPU kernels. What a
GPU refuses is refused with PyTorch's own exceptions. :mod:`samestep.fake_gpus.table` lists what is faked and how
strictly.

    host_memory   a tensor's device, without moving its bytes        kernels   every operator, and mixed devices
    native        what C++ asks about CUDA                           cuda      what torch.cuda asks C++ for
    devices       how many, CUDA_VISIBLE_DEVICES, forks              streams   streams and events
    generators    random numbers with the state of CUDA's            groups    NCCL
    loading       storages, pinned memory, other processes           models    LSTM, GRU, DataParallel, SyncBatchNorm

This package is imported only where fake GPUs are asked for; importing it changes nothing, :func:`install` does.
"""

from __future__ import annotations

from samestep.rankenv import variable

__all__ = ["VARIABLE", "asked", "install", "remove"]

VARIABLE = "SAMESTEP_FAKE_GPUS"
LARGEST = 64  # what torch.cuda reads of CUDA_VISIBLE_DEVICES


def asked() -> int | None:
    """Returns how many fake GPUs the environment asks for, or None.

    Raises:
        UsageError: it asks for no number of GPUs.
    """
    text = variable(VARIABLE)
    return None if not text else number(text, VARIABLE)


def number(text: str, option: str) -> int:
    """Returns a number of fake GPUs that somebody has written.

    Raises:
        UsageError: it is none.
    """
    from samestep.errors import UsageError

    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise UsageError(f"{option} is a number of GPUs from 1 to {LARGEST}, and not {text!r}; leave it out for none")
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


def remove() -> None:
    """Takes the fake GPUs away; tensors on them must not be used any more."""
    from samestep.fake_gpus import installing

    installing.remove()
