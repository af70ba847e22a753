"""What C++ asks about CUDA: which device is current, its streams, whether there is any.

A build of PyTorch without CUDA answers with stubs, one with CUDA asks the driver. Both are objects with a table of
virtual functions; here they get a copy of the table with a few functions replaced. The places of these functions are
read from the headers that come with PyTorch.

The functions are a few instructions each. Python's own, by ctypes, would not do: C++ also calls them while an exception
of Python is on its way, and no function of ctypes can return a stream (16 bytes).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

_TYPES: Any = torch._C._autograd.DeviceType  # noqa: SLF001
CPU, CUDA = int(_TYPES.CPU), int(_TYPES.CUDA)
TORCH = Path(torch.__file__).parent
GUARD, HOOKS = "c10/core/impl/DeviceGuardImplInterface.h", "ATen/detail/AcceleratorHooksInterface.h"
CUDA_HOOKS = "ATen/detail/CUDAHooksInterface.h"
REGISTRY, GET_HOOKS = "_ZN3c104impl26device_guard_impl_registryE", "_ZN2at6detail12getCUDAHooksEv"
CPU_ALLOCATOR = "_ZN3c1015GetCPUAllocatorEv"
ENTRIES = 96  # of a table that are copied; the longest has about 50

_process = ctypes.PyDLL(None)
_get_value, _set_value = _process.pthread_getspecific, _process.pthread_setspecific
_get_value.restype, _set_value.argtypes = ctypes.c_void_p, [ctypes.c_uint, ctypes.c_void_p]
_key = ctypes.c_uint()
_process.pthread_key_create(ctypes.byref(_key), None)
KEY = _key.value  # under which each thread keeps the number of its current GPU


def current_index() -> int:
    index: int | None = _get_value(KEY)
    return index or 0


def set_index(index: int) -> int:
    """Makes GPU `index` current in this thread, unless it is negative; returns the one that was."""
    before = current_index()
    if index >= 0:
        _set_value(KEY, index)
    return before


def _address(function: Any) -> bytes:
    return (ctypes.cast(function, ctypes.c_void_p).value or 0).to_bytes(8, "little")


def _code(gpus: int) -> dict[str, bytes]:
    """Returns the functions for x86-64: arguments in rdi (the object), rsi; results in rax, rdx.

    A c10::Device is two bytes, its type and its number; a c10::Stream is a device and, in rdx, a number.
    """
    key = KEY.to_bytes(4, "little")
    get = bytes.fromhex("bf") + key + bytes.fromhex("48b8") + _address(_get_value) + bytes.fromhex("ffd0")
    put = bytes.fromhex("bf") + key + bytes.fromhex("48b8") + _address(_set_value)
    packed = bytes.fromhex("0fb6c0 c1e008 83c8") + bytes([CUDA])  # movzx eax, al; shl eax, 8; or eax, CUDA
    allocator = ctypes.CDLL(str(TORCH / "lib" / "libc10.so"))[CPU_ALLOCATOR]
    return {
        # sub rsp, 8; pthread_getspecific(key); add rsp, 8; pack; ret
        "getDevice": bytes.fromhex("4883ec08") + get + bytes.fromhex("4883c408") + packed + b"\xc3",
        # movzx esi, si; shr esi, 8; jump to pthread_setspecific(key, index)
        "setDevice": bytes.fromhex("0fb7f6 c1ee08") + put + bytes.fromhex("ffe0"),
        # push rbx; mov ebx, esi; pthread_getspecific(key); pack; push rax; sub rsp, 8; movzx esi, bx; shr esi, 8;
        # pthread_setspecific(key, index); add rsp, 8; pop rax; pop rbx; ret
        "exchangeDevice": bytes.fromhex("53 89f3")
        + get
        + packed
        + bytes.fromhex("50 4883ec08 0fb7f3 c1ee08")
        + put
        + bytes.fromhex("ffd0 4883c408 58 5b c3"),
        "stream": bytes.fromhex("0fb7c6 31d2 c3"),  # movzx eax, si; xor edx, edx; ret
        "count": b"\xb8" + gpus.to_bytes(4, "little") + b"\xc3",  # mov eax, gpus; ret
        "yes": bytes.fromhex("b801000000 c3"),
        "no": bytes.fromhex("31c0 c3"),
        "zero": bytes.fromhex("660fefc0 c3"),  # pxor xmm0, xmm0; ret
        "nothing": b"\xc3",
        "allocator": bytes.fromhex("48b8") + _address(allocator) + bytes.fromhex("ffe0"),
    }


# The device guard: what a stream is given is done when the call returns, so events have nothing to do.
GUARD_FUNCTIONS = {
    **{name: name for name in ("exchangeDevice", "getDevice", "setDevice")},
    "uncheckedSetDevice": "setDevice",
    "deviceCount": "count",
    **dict.fromkeys(
        ("getStream", "getDefaultStream", "getStreamFromGlobalPool", "getNewStream", "exchangeStream"), "stream"
    ),
    **dict.fromkeys(("record", "block", "synchronizeEvent", "synchronizeDevice", "synchronizeStream"), "nothing"),
    **dict.fromkeys(("queryEvent", "queryStream"), "yes"),
    "elapsedTime": "zero",
}
HOOK_FUNCTIONS = {
    **dict.fromkeys(("isBuilt", "isAvailable", "hasCUDA"), "yes"),
    "hasPrimaryContext": "no",
    "init": "nothing",
    "compiledWithCuDNN": "no",  # so BatchNorm takes the kernels that CPUs have, too
    "getPinnedMemoryAllocator": "allocator",
}


def _places(*headers: str) -> dict[str, int]:
    """Returns the place of each function in the table of a class that is declared with its bases in these headers."""
    found: dict[str, int] = {}
    place = 0
    for header in headers:
        text = (TORCH / "include" / header).read_text("utf-8")
        text = re.sub(r"//[^\n]*|/\*.*?\*/|#ifdef USE_ROCM.*?#endif", "", text, flags=re.DOTALL)
        for name in re.findall(r"\bvirtual\s[^;{}=(]*?(~?\w+)\(", text):
            if name not in found:
                found[name] = place
                place += 2 if name.startswith("~") else 1  # a destructor has two entries
    return found


def _table_of(thing: int, addresses: Mapping[str, int], functions: Mapping[str, str], places: Mapping[str, int]) -> Any:
    """Returns a copy of the table of the object at an address, with some functions replaced."""
    old = ctypes.c_void_p.from_address(thing).value or 0
    table = (ctypes.c_void_p * ENTRIES)(*(ctypes.c_void_p.from_address(old + 8 * n).value for n in range(ENTRIES)))
    for name, code in functions.items():
        table[places[name]] = addresses[code]
    return table


def _without_timer(libraries: Path) -> Callable[[], None]:
    """Hides CUDA's timer from DistributedDataParallel, which would ask the driver; returns what shows it again.

    The registry begins with a std::unordered_map, that with its buckets and their number. A build without CUDA has no
    such timer, and DistributedDataParallel does without.
    """
    registry = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))["_ZN4c10d13TimerRegistryEv"]
    registry.restype = ctypes.c_void_p
    buckets, count = (ctypes.c_uint64 * 2).from_address(registry())
    if count <= CUDA:
        return lambda: None
    bucket = ctypes.c_void_p.from_address(buckets + 8 * (CUDA % count))
    before, bucket.value = bucket.value, None
    return partial(setattr, bucket, "value", before)


class Native:
    """The device guard and the hooks of CUDA, from :meth:`install` to :meth:`remove`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def install(self, gpus: int) -> None:
        if platform.machine() != "x86_64":
            raise RuntimeError(f"fake GPUs are made on x86-64 only, and this is {platform.machine()}")
        try:
            self._install(gpus)
            found = str(torch._C._accelerator_getAccelerator())  # noqa: SLF001
        except (OSError, ValueError, KeyError, AttributeError) as error:
            self.remove()
            raise RuntimeError(f"fake GPUs cannot be made with torch {torch.__version__}: {error!r}") from error
        if found != "cuda":
            self.remove()
            raise RuntimeError(f"fake GPUs cannot be made with torch {torch.__version__}: it takes {found} for its GPU")

    def _install(self, gpus: int) -> None:
        memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        addresses = {}
        for name, code in _code(gpus).items():
            addresses[name] = start + memory.tell()
            memory.write(code.ljust(64, b"\xcc"))
        libraries = TORCH / "lib"
        registry = (ctypes.c_void_p * (CUDA + 1)).in_dll(ctypes.CDLL(str(libraries / "libc10.so")), REGISTRY)
        get_hooks = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))[GET_HOOKS]
        get_hooks.restype = ctypes.c_void_p
        pointer = ctypes.c_void_p.from_address(get_hooks())
        guard = _table_of(registry[CPU] or 0, addresses, GUARD_FUNCTIONS, _places(GUARD))
        hooks = _table_of(ctypes.addressof(pointer), addresses, HOOK_FUNCTIONS, _places(HOOKS, CUDA_HOOKS))
        thing = (ctypes.c_void_p * 1)(ctypes.addressof(guard))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object([memory, guard, hooks, thing]))  # C++ calls them until the very end
        self._undo.append(partial(registry.__setitem__, CUDA, registry[CUDA]))
        self._undo.append(partial(setattr, pointer, "value", pointer.value))
        self._undo.append(_without_timer(libraries))
        registry[CUDA], pointer.value = ctypes.addressof(thing), ctypes.addressof(hooks)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
