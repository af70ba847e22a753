"""What every rank of the doctor's trial runs: a step of DistributedDataParallel over each backend that is named.

    python -m samestep.doctor.step FILE BACKEND …          started by `samestep run -n 2`, or by mpiexec

Rank 0 appends one JSON line for each backend to FILE, as soon as it knows it: what a later one does is no loss.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.rankenv import variable

WIDTH = 64


def main(arguments: Sequence[str]) -> None:
    file, *backends = arguments
    for backend in backends:
        device = None if backend == "nccl" else "cpu"
        if variable("WORLD_SIZE") == "1":  # one GPU: `samestep.world` makes no group for a rank alone
            gpu = torch.device("cuda", 0) if backend == "nccl" else None
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=gpu)
        with samestep.world(backend=backend, device=device) as world:
            found = step(world.rank, world.size, world.device)
            if world.is_first:
                with Path(file).open("a", encoding="utf-8") as out:
                    print(json.dumps({"backend": backend, **found, **_torch()}), file=out)
        if dist.is_initialized():
            dist.destroy_process_group()


def step(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Takes two steps; returns whether the gradient is the mean of the ranks', and what the second took. Collective."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, 1, bias=False).to(device))
    seconds = 0.0
    for _ in range(2):
        model.zero_grad()
        dist.barrier()
        begun = time.perf_counter()
        model(torch.full((1, WIDTH), rank + 1.0, device=device)).sum().backward()
        gradient = model.module.weight.grad
        right = bool((gradient == (size + 1) / 2).all())  # the mean of 1 … size; small whole numbers, so exact
        seconds = time.perf_counter() - begun
    return {"right": right, "seconds": seconds, "ranks": size}


def _torch() -> dict[str, Any]:
    library: Any = torch.cuda.nccl
    nccl = ".".join(map(str, library.version())) if dist.is_nccl_available() else None
    openmp = re.search(r"OpenMP \d+ \(a\.k\.a\. (OpenMP [\d.]+)\)", torch.__config__.show())
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "mpi": dist.is_mpi_available(),
        "openmp": openmp[1] if openmp else "no OpenMP",
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
