"""What torch.cuda asks its C++ for: every function and class of it that a build without CUDA lacks, answered here.

torch.cuda's own Python code then behaves as on a GPU, with its checks and its messages. What can only be named is
named by :func:`samestep.fake_gpus.notes.say_once` when a script first uses it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from samestep.fake_gpus import devices, streams
from samestep.fake_gpus.native import CUDA, current_index, set_index
from samestep.fake_gpus.notes import around, not_faked, not_faked_class, say_once
from samestep.instrument.patch import Patches

MEMORY = 80 << 30  # bytes that every fake GPU reports
CAPABILITY = (9, 0)
CUDA_VERSION, CUDNN_VERSION, NCCL_VERSION = "12.8", 91002, (2, 27, 3)
PROPERTIES = {  # torch.cuda.get_device_properties
    "name": "fake GPU of samestep",
    "major": CAPABILITY[0],
    "minor": CAPABILITY[1],
    "total_memory": MEMORY,
    "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 << 20,
    "clock_rate": 1_980_000,
    "memory_clock_rate": 2_619_000,
    "memory_bus_width": 5120,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "gcnArchName": "",
    "pci_device_id": 0,
    "pci_domain_id": 0,
}
# torch.cuda.memory_stats: figures of each pool, of all memory, and plain numbers
OF_POOLS = """
    allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes
    allocation segment active inactive_split
"""
OF_ALL = "oversize_allocations oversize_segments"
NUMBERS = "num_alloc_retries num_ooms max_split_size num_sync_all_streams num_device_alloc num_device_free"


def _properties(index: int) -> SimpleNamespace:
    number = devices.visible()[index]
    own = uuid.UUID(devices.uuids()[number].removeprefix("GPU-"))
    return SimpleNamespace(**PROPERTIES, pci_bus_id=number, uuid=own)


def _device_count() -> int:
    if devices.DEVICES.touched is None:
        devices.DEVICES.touched = os.getpid()  # a process that is forked from here on can use no GPU
    return devices.count()


def _set_device(index: int) -> None:
    set_index(devices.check_index(index))


def _exchange_device(index: int) -> int:
    return -1 if index < 0 else set_index(devices.check_index(index))


def _memory_stats(_device: int = 0) -> dict[str, Any]:
    zeros = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    by_pool = dict.fromkeys(("all", "small_pool", "large_pool"), zeros)
    return {
        **dict.fromkeys(OF_POOLS.split(), by_pool),
        **dict.fromkeys(OF_ALL.split(), zeros),
        **dict.fromkeys(NUMBERS.split(), 0),
    }


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_named: value


class _Status(int):
    """A result of the CUDA runtime: 0 is success."""

    success = 0


CUDART = SimpleNamespace(
    cudaError=_Status,
    cudaGetErrorString=_constant("no error"),
    cudaMemGetInfo=_constant((MEMORY, MEMORY)),
    **dict.fromkeys(
        ("cudaDeviceSynchronize", "cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister"),
        _constant(0),
    ),
)

NO_EFFECT = """
    _cuda_synchronize _cuda_sleep _cuda_ipc_collect _cuda_emptyCache _cuda_record_memory_history
    _cuda_record_memory_history_legacy _cuda_setMemoryFraction _cuda_cudaCachingAllocator_enable
    _cuda_set_sync_debug_mode _cuda_set_cudnn_benchmark_limit _cuda_lock_mutex _cuda_unlock_mutex
    _cuda_resetPeakMemoryStats _cuda_resetPeakHostMemoryStats _cuda_resetAccumulatedMemoryStats
    _cuda_resetAccumulatedHostMemoryStats _accelerator_emptyCache _accelerator_emptyHostCache
    _accelerator_synchronizeDevice _accelerator_resetPeakStats _accelerator_resetAccumulatedStats
"""
C_FUNCTIONS: dict[str, Any] = {
    **dict.fromkeys(NO_EFFECT.split(), _constant(None)),
    "_cuda_init": devices.begin,
    "_cuda_getDeviceCount": _device_count,
    "_cuda_getDevice": current_index,
    "_cuda_setDevice": _set_device,
    "_cuda_exchangeDevice": _exchange_device,
    "_cuda_maybeExchangeDevice": _exchange_device,
    "_cuda_isInBadFork": devices.is_forked,
    "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
    "_cuda_memoryStats": _memory_stats,
    "_cuda_hostMemoryStats": _constant({}),
    "_cuda_memorySnapshot": _constant({"segments": [], "device_traces": []}),
    "_cuda_getMemoryFraction": _constant(1.0),
    "_cuda_getAllocatorBackend": _constant("native"),
    "_cuda_cudaCachingAllocator_is_enabled": _constant(True),
    "_cuda_getArchFlags": _constant("sm_90 compute_90"),
    "_cuda_getCurrentStream": streams.current,
    "_cuda_getDefaultStream": lambda index: (0, devices.check_index(index), CUDA),
    "_cuda_setStream": streams.select,
    "_cuda_getCurrentRawStream": lambda index: streams.current(index)[0],
    "_cuda_getCurrentBlasHandle": _constant(0),
    "_cuda_get_sync_debug_mode": _constant(0),
    "_cuda_isCurrentStreamCapturing": _constant(False),
    "_cuda_get_cudnn_benchmark_limit": _constant(10),
    "_accelerator_setDeviceIndex": _set_device,
    "_accelerator_isAllocatorInitialized": _constant(True),
    "_accelerator_getDeviceStats": _memory_stats,
    "_accelerator_getMemoryInfo": _constant((MEMORY, MEMORY)),
    "_accelerator_getStream": torch.cuda.current_stream,
    "_accelerator_setStream": torch.cuda.set_stream,
}


class _Typed(type):
    """The type of torch.cuda.FloatTensor and its kin: what isinstance says of a tensor."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is cls.dtype

    def __call__(cls, *args: Any, **named: Any) -> torch.Tensor:
        named = {"dtype": cls.dtype, "device": "cuda", **named}
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.tensor(args[0], **named) if not isinstance(args[0], torch.Tensor) else args[0].to(**named)
        return torch.empty(*(args or (0,)), **named)


KINDS = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
TYPES: dict[str, torch.dtype] = {name: getattr(torch, f"{name}Tensor").dtype for name in KINDS}


@around
def _default_tensor_type(original: Callable[..., Any], kind: Any) -> None:
    name = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
    typed = TYPES.get(name.removeprefix("torch.cuda.").removesuffix("Tensor")) if "torch.cuda." in name else None
    if typed is None:
        original(kind)
        torch.set_default_device(None)
    else:
        torch.set_default_dtype(typed)
        torch.set_default_device("cuda")


def _compile(model: Any = None, **_options: Any) -> Any:
    say_once("torch.compile", "what it compiles runs as it is written, kernel by kernel")
    return (lambda later: later) if model is None else model


def patch_cuda(patches: Patches) -> None:
    cuda: Any = torch.cuda
    for name, value in C_FUNCTIONS.items():
        patches.set(torch._C, name, value)  # noqa: SLF001
    for name, value in {
        "_initialized": False,
        "_cudart": CUDART,
        "_cached_device_count": None,
        "_queued_calls": list(cuda._queued_calls),  # noqa: SLF001
        "_lazy_seed_tracker": type(cuda._lazy_seed_tracker)(),  # noqa: SLF001
        "default_generators": (),
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "_is_in_bad_fork": C_FUNCTIONS["_cuda_isInBadFork"],
        "_get_device_properties": _properties,
        "_raw_device_count_nvml": lambda: devices.DEVICES.total,
        "_raw_device_uuid_nvml": devices.uuids,
        "device_count": devices.count,
    }.items():
        patches.set(cuda, name, value)
    for kind in (streams.Stream, streams.ExternalStream, streams.Event):
        patches.set(cuda, kind.__name__, kind)
        patches.set(cuda.streams, kind.__name__, kind)
    for home in (cuda, cuda.graphs):
        patches.set(home, "is_current_stream_capturing", _constant(False))
    no_graph = "run the step without a graph"
    for name in ("CUDAGraph", "graph"):
        patches.set(cuda, name, not_faked_class(f"torch.cuda.{name}", no_graph))
    patches.set(cuda, "make_graphed_callables", not_faked("torch.cuda.make_graphed_callables", no_graph))
    patches.set(cuda.nccl, "version", _constant(NCCL_VERSION))
    patches.set(cuda.nccl, "is_available", _constant(False))  # of its C++, for several GPUs of one process
    patches.set(torch.backends.cudnn, "is_acceptable", _constant(False))
    patches.set(
        cuda.nvtx, "_nvtx", SimpleNamespace(rangePushA=_constant(0), rangePop=_constant(0), markA=_constant(None))
    )
    for name, dtype in TYPES.items():
        patches.set(cuda, f"{name}Tensor", _Typed(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"}))
    patches.set(torch, "set_default_tensor_type", _default_tensor_type(torch.set_default_tensor_type))
    patches.set(torch.version, "cuda", CUDA_VERSION)
    patches.set(torch.backends.cuda, "is_built", _constant(True))
    patches.set(torch.backends.cudnn, "is_available", _constant(True))
    patches.set(torch.backends.cudnn, "version", _constant(CUDNN_VERSION))
    patches.set(torch, "compile", _compile)
    patches.set(torch._C, "_show_config", _constant(torch._C._show_config()))  # noqa: SLF001  (it asks CUDA's hooks)
