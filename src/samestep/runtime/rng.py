"""Random streams: one seed for a run, and a stream of its own for every purpose, rank and epoch.

A stream is named, and its seed is the BLAKE2b digest of the names. With the same `manual_seed` on every rank dropout
masks are the same everywhere; with `seed + rank` the streams of seed 0, rank 1 and of seed 1, rank 0 are one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from samestep import rankenv
from samestep.seeding import derive_seed

HOST = torch.device("cpu")


def seed_everything(seed: int, *names: str | int) -> None:
    value = derive_seed(seed, *names)
    seed_device(value, HOST)
    torch.manual_seed(value)  # every CUDA device too, lazily


def seed_device(value: int, device: torch.device) -> None:
    """Seeds Python's, NumPy's and torch's global generators from 63 bits: on the host, and on `device`.

    `torch.manual_seed` looks for every kind of device there is, which takes 0.7 ms.
    """
    random.seed(value)
    # NumPy and torch are the same Mersenne Twister, seeded with 32 bits each: of the same they would draw the same
    np.random.seed(value >> 31)  # noqa: NPY002  (the global generator is the one that transforms draw from)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


def generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))


@dataclass(frozen=True)
class RngState:
    """The state of the global generators: Python's, NumPy's, torch's on the host, and on one GPU."""

    of_python: Any
    of_numpy: Any
    of_torch: torch.Tensor
    device: torch.device
    on_device: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> Self:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        of_numpy = np.random.get_state()  # noqa: NPY002
        return cls(random.getstate(), of_numpy, torch.default_generator.get_state(), device, on_device)

    def restore(self) -> None:
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # noqa: NPY002
        torch.default_generator.set_state(self.of_torch)
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Leaves the global generators, and that of `device`, as they were."""
    before = RngState.capture(device)
    try:
        yield
    finally:
        before.restore()


def keep_generators() -> AbstractContextManager[None]:
    """Leaves the random streams of the host and of all its GPUs as they were.

    torch.random.fork_rng does so too, but warns wherever there is more than one GPU, and starts CUDA on each.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if used else ())


def use_deterministic_algorithms() -> None:
    """Asks torch and cuDNN for algorithms that give the same bits from run to run.

    The price, on CUDA: cuDNN may not choose the fastest convolution (10-30 % slower ResNets are usual), some
    operations get a slower kernel and a few raise because they have no deterministic one; cuBLAS needs a fixed
    workspace (CUBLAS_WORKSPACE_CONFIG, set here unless it is set already). On the CPU it costs next to nothing: the
    order of summation already depends on shapes and thread counts alone.

    Source: PyTorch notes, "Reproducibility".
    """
    if rankenv.variable("CUBLAS_WORKSPACE_CONFIG") is None:
        rankenv.set_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
