"""Streams and events of fake GPUs: what is put on a stream has run when the call returns, so order holds.

Their methods are those of torch.Stream and torch.Event, which ask the device guard (:mod:`.native`).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from time import perf_counter
from typing import Any, Self

import torch

from samestep.fake_gpus.devices import check_index
from samestep.fake_gpus.native import CUDA, set_index

_numbers = itertools.count(1)
_thread = threading.local()


def select(stream_id: int, device_index: int, device_type: int = CUDA) -> None:
    """Makes a stream the current one of its device, and its device the current one."""
    del device_type
    set_index(device_index)
    _streams()[device_index] = stream_id


def current(index: int) -> tuple[int, int, int]:
    """Returns the current stream of a device: its number, the device's, and the type of device."""
    index = check_index(index)
    return _streams().get(index, 0), index, CUDA


def _streams() -> dict[int, int]:
    if not hasattr(_thread, "streams"):
        _thread.streams = {}
    streams: dict[int, int] = _thread.streams
    return streams


class Stream(torch.Stream):
    """As torch.cuda.Stream."""

    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Self:
        if "stream_id" not in known:
            index = torch.cuda._utils._get_device_index(device, optional=True)  # noqa: SLF001
            known = {"stream_id": next(_numbers), "device_index": check_index(index), "device_type": CUDA}
        made = super().__new__(cls, **known)
        made.priority = min(max(priority, -5), 0)
        return made

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    @property
    def cuda_stream(self) -> int:
        """A number in place of the handle."""
        return self.stream_id

    @property
    def _as_parameter_(self) -> Any:
        return ctypes.c_void_p(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        entered = getattr(self, "_entered", [])
        entered.append(torch.cuda.stream(self))  # type: ignore[arg-type]
        self._entered = entered
        entered[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """As torch.cuda.ExternalStream."""

    def __new__(cls, stream_ptr: int, device: Any = None, **known: Any) -> Self:
        index = check_index(torch.cuda._utils._get_device_index(device, optional=True))  # noqa: SLF001
        return super().__new__(cls, stream_id=stream_ptr, device_index=index, device_type=CUDA, **known)


class Event(torch.Event):
    """As torch.cuda.Event; times are the host's."""

    enable_timing: bool
    time = 0.0  # of the host, in seconds, when it was recorded

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Self:
        del blocking, interprocess, external
        made = super().__new__(cls, torch.device("cuda"))
        made.enable_timing = enable_timing
        return made

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)
        self.time = perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError(
                "Both events must be created with argument 'enable_timing=True' before calculating elapsed time."
            )
        if not (self.time and end_event.time):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(end_event.time - self.time) * 1e3

    @property
    def cuda_event(self) -> int:
        """A number in place of the handle; 0 until it is recorded."""
        return id(self) if self.time else 0

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>" if self.time else "<torch.cuda.Event uninitialized>"
