"""A TorchFunctionMode that begins and ends anywhere in a script.

Modes end in the reverse order of their beginnings. So it begins only where no other one has, but for these and the one
of torch.set_default_device, and ends where it is the last.
"""

from __future__ import annotations

import functools
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from samestep.instrument.patch import call_site, is_own, own_frame

_RECORDING = ("samestep.verification.recording.", "samestep.verification.reference.")


class LooseMode(TorchFunctionMode):
    """Base class of the modes that watch a script."""

    def __init__(self) -> None:
        super().__init__()
        self._is_entered = False

    def enter(self) -> None:
        """Sees calls from now on, where that can be."""
        device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001  (set_default_device)
        if not self._is_entered and all(one is device or isinstance(one, LooseMode) for one in _stack()):
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_entered = True

    def leave(self) -> None:
        """Sees none any more, where that can be."""
        if self._is_entered and _stack()[-1:] == [self]:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_entered = False


def _stack() -> list[Any]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor has a storage in which its numbers lie one behind the other."""
    return type(tensor) in {Tensor, nn.Parameter} and tensor.layout == torch.strided


def storage_of(tensor: Tensor) -> int:
    """Returns what tells the memory of a tensor from others; of a DTensor, that of this rank's numbers."""
    own = getattr(tensor, "_local_tensor", tensor)
    return int(own.untyped_storage().data_ptr()) if own.layout == torch.strided else id(own)


def line_of(frame: FrameType | None) -> str | None:
    """Returns the user's line that a call belongs to; None where what records the script has made it."""
    own = frame
    while own is not None and not is_own(own.f_code.co_filename):
        if str(own.f_globals.get("__name__")).startswith(_RECORDING):
            return None
        own = own.f_back
    return call_site(own or frame)


def caller_of(frame: FrameType | None) -> tuple[str, int, int] | None:
    """Returns the user's line that calls the function of a call's line, with the lines of the function around it.

    None where no function of the user's calls it directly.
    """
    own = own_frame(frame)
    caller = None if own is None else own.f_back
    if caller is None or not is_own(caller.f_code.co_filename):
        return None
    return call_site(caller), *_lines_of(caller.f_code)


@functools.cache
def _lines_of(code: CodeType) -> tuple[int, int]:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return min(lines), max(lines)
