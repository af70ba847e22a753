"""Events for PyTorch's profiler, as its own backends leave them: "mpi:all_reduce", with the shapes of what was given.

The profiler takes an event for an asynchronous one if it ends on another thread than it began on, and collectives are
asynchronous to it. So while it looks on, the thread that issues one never carries it out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__: list[str] = []


def begun(what: str, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
    """Begins an event; returns what ends it, on another thread. None where nobody profiles."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001
        return None
    handle = torch.autograd._record_function_with_args_enter(f"mpi:{what}", *tensors)  # type: ignore[attr-defined]  # noqa: SLF001
    return functools.partial(torch.autograd._record_function_with_args_exit, handle)  # type: ignore[attr-defined]  # noqa: SLF001
