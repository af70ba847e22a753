"""When a script has failed for want of a GPU: what it says then, and the command that would run it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

WANT = re.compile(
    "|".join(  # noqa: FLY002  (one kind a line)
        (
            r"module 'torch\._C' has no attribute '_cuda_\w+'",
            r"Torch not compiled with CUDA enabled|compiled without CUDA support|requires CUDA support",
            r"Found no NVIDIA driver|No CUDA GPUs are available|no GPUs found|torch\.cuda\.is_available\(\) is False",
            r"doesn't have NCCL built in|CUDA error: invalid device ordinal|backend 'nccl' moves GPU tensors only",
            r"with arguments from the 'CUDA' backend|not linked with support for cuda devices",
            r"Unable to locate sufficient \d+ gpus|Attempting to deserialize object on (a )?CUDA device",
            r"nccl.{0,40}install a CUDA build of torch",
        )
    )
)
TAIL = 8192  # bytes of a log that are looked through


def wants_gpus(texts: Iterable[str]) -> bool:
    """Returns whether one of these texts says that a GPU is missing.

    Example:
        >>> wants_gpus(["AssertionError: Torch not compiled with CUDA enabled"])
        True
    """
    return any(WANT.search(text) for text in texts)


def suggest(command: str, program: str, gpus: int, ranks: int) -> str:
    missing = "this host has none" if not gpus else f"this host has {gpus} for {ranks} ranks"
    return (
        f"the script wants GPUs, and {missing}: `samestep {command} --fake-gpus {program}` runs it on CPUs, as if "
        "there were one for each rank"
    )


def ends_of(paths: Iterable[Path]) -> list[str]:
    """Returns the last lines of logs, of those that can be read."""
    found = []
    for path in paths:
        try:
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - TAIL))
                found.append(log.read().decode(errors="replace"))
        except OSError:
            continue
    return found
