"""Which fake GPUs a process has: CUDA_VISIBLE_DEVICES, read when CUDA is first used, and the process that uses it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from samestep.fake_gpus.generators import make_generators
from samestep.fake_gpus.native import current_index


@dataclass
class Devices:
    """The fake GPUs of the host; those of them that this process sees; who uses them.

    `process` has begun to use CUDA, `touched` has at least asked it for devices: a process that is forked from either
    cannot use it.
    """

    total: int = 0
    seen: tuple[int, ...] | None = None
    process: int | None = None
    touched: int | None = None


DEVICES = Devices()


def visible() -> tuple[int, ...]:
    """Returns the numbers on the host of the GPUs that this process sees, in its own order."""
    if DEVICES.seen is None:
        cuda: object = torch.cuda
        named = cuda._parse_visible_devices()  # type: ignore[attr-defined]  # noqa: SLF001  (torch's own reading)
        if named and isinstance(named[0], str):
            named = cuda._transform_uuid_to_ordinals(named, uuids())  # type: ignore[attr-defined]  # noqa: SLF001
        seen: list[int] = []
        for number in named:
            if not 0 <= number < DEVICES.total:
                break  # the driver, too, ignores what follows
            seen.append(number)
        DEVICES.seen = tuple(seen)
    return DEVICES.seen


def count() -> int:
    return len(visible())


def uuids() -> list[str]:
    return [f"GPU-fa4e0000-0000-0000-0000-{number:012x}" for number in range(DEVICES.total)]


def check_process() -> None:
    """Begins to use CUDA in this process, unless it was forked from one that had begun before."""
    if DEVICES.process != os.getpid():
        begin()
        torch.cuda.init()  # type: ignore[no-untyped-call]  # seeds that were given before


def begin() -> None:
    """Makes the GPUs of this process; torch.cuda calls it when it is first used."""
    if DEVICES.process != os.getpid():
        if is_forked():
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        DEVICES.process = DEVICES.touched = os.getpid()
        torch.cuda.default_generators = make_generators(count())  # type: ignore[assignment]


def is_forked() -> bool:
    return DEVICES.touched not in {None, os.getpid()}


def forget(total: int) -> None:
    DEVICES.total, DEVICES.seen, DEVICES.process, DEVICES.touched = total, None, None, None


def check_index(index: int | None) -> int:
    """Returns the number of a GPU, of the current one for None, or raises what CUDA raises."""
    check_process()
    index = current_index() if index is None or index < 0 else index
    if index >= count():
        kind: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
        there = f"cuda:0 to cuda:{count() - 1}" if count() else "none"
        text = f"cuda:{index} was asked for; fake GPUs of this process: {there}"
        raise kind(f"CUDA error: invalid device ordinal\n{text}")
    return index


def two_devices(one: object, other: object) -> RuntimeError:
    """Returns what PyTorch raises where an operator gets tensors of two devices."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}!"
    )
