# ruff: noqa: ARG001  (the kernels have the arguments of their operators)
"""NCCL on fake GPUs: a process group of gloo behind it, and NCCL's refusals before it.

PyTorch hands a collective on tensors of a GPU to the dispatcher, by its name and the key `CUDA`. Here the kernels for
that key pass the same bytes to gloo, in host memory. A group of NCCL is registered for GPUs alone, so that PyTorch
itself refuses a CPU tensor. Two ranks on one GPU are found at the first collective of a group, where NCCL finds them.
"""

from __future__ import annotations

import itertools
import socket
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from samestep.fake_gpus import devices
from samestep.fake_gpus.host_memory import to_host
from samestep.fake_gpus.models import tensors_in
from samestep.fake_gpus.notes import around
from samestep.instrument.patch import Patches

_work_of: Any = c10d.__dict__["_create_work_from_future"]
CARD = torch.device("cuda")
MARK = "fake NCCL"
_numbers = itertools.count()
_checked: set[str] = set()
_factor: list[Any] = [1.0]  # of the latest PREMUL_SUM, which C++ does not tell
_latest: list[Any] = []  # the group that was made last, until torch.distributed has asked of what class it is


class _ClassOfGroup(type):
    """Lets torch.distributed make a group, and ask at once whether it is one of NCCL."""

    def __call__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
        if devices.count() == 0:
            raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
        own: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        own._devices = [dist.ProcessGroupGloo.create_default_device()]  # noqa: SLF001
        limit = getattr(options, "_timeout", timeout)
        if limit is not None:
            own._timeout = limit  # noqa: SLF001
        own.group_name = f"{MARK} {next(_numbers)}"
        _latest[:] = [dist.ProcessGroupGloo(store, rank, size, own)]
        return _latest[0]

    def __instancecheck__(cls, value: object) -> bool:
        return any(value is one for one in _latest)


class ProcessGroupNCCL(metaclass=_ClassOfGroup):
    """As torch.distributed.ProcessGroupNCCL: a group of gloo that serves tensors of fake GPUs."""

    class Options:
        """As torch.distributed.ProcessGroupNCCL.Options; only the timeout has an effect."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout: Any = None
            self.config: Any = dist.distributed_c10d.__dict__.get("_NCCLConfig")

    NCCLConfig = type("NCCLConfig", (), {})


def _host(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.device.type != "cuda":
            raise RuntimeError("No backend type associated with device type cpu")
        host = to_host(value)
        return host.view(torch.uint8) if host.dtype is torch.bool else host
    return [_host(item) for item in value]


def _check_dense(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError("Tensors must be dense")
        if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("Tensors must be contiguous")


def _nothing() -> None: ...


class _Group:
    def __init__(self, boxed: Any, tensors: Any, timeout: int = -1, *, pair: bool = False) -> None:
        devices.check_process()
        group: Any = dist.ProcessGroup.unbox(boxed)
        self.backend = group._get_backend(CARD)  # noqa: SLF001
        self.timeout = timeout
        self.tensors = tensors_in(tensors)
        _check_dense(self.tensors)
        if not pair:
            self._check_gpus()

    @property
    def _name(self) -> str:
        return str(getattr(getattr(self.backend, "options", None), "group_name", ""))

    @property
    def is_nccl(self) -> bool:
        """Whether it stands for a group of NCCL; else it is one of gloo."""
        return self._name.startswith(MARK)

    def _check_gpus(self) -> None:
        """Refuses two ranks on one GPU, once a group, in its first collective."""
        name, size, rank = self._name, self.backend.size(), self.backend.rank()
        if not self.is_nccl or name in _checked or size == 1:
            return
        _checked.add(name)
        index = self.tensors[0].get_device() if self.tensors else torch.cuda.current_device()
        own = torch.tensor([zlib.crc32(socket.gethostname().encode()), devices.visible()[index]], device="cpu")
        every = [torch.empty_like(own) for _ in range(size)]
        self.backend.allgather([every], [own]).wait()
        for other, place in enumerate(every):
            if other != rank and torch.equal(place, own):
                raise dist.DistBackendError(
                    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details). Last error:\n"
                    f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {int(own[1])}\n"
                    "(fake GPUs: each rank calls torch.cuda.set_device(LOCAL_RANK) before its first collective, and "
                    "--fake-gpus N is at least the number of ranks of a host)"
                )

    def options(self, kind: Any, **fields: Any) -> Any:
        made = kind()
        if self.timeout > 0:
            made.timeout = timedelta(milliseconds=self.timeout)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def reduction(
        self, boxed: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Any, Callable[[], object]]:
        """Returns an operation that gloo knows, and what is to be done when it has ended."""
        op: Any = c10d.ReduceOp.RedOpType(boxed.op())
        if op == c10d.ReduceOp.AVG:
            size = self.backend.size()
            return c10d.ReduceOp.SUM, lambda: [tensor.div_(size) for tensor in outputs]
        if op == c10d.ReduceOp.PREMUL_SUM:
            factor = _factor[-1]
            for tensor in inputs:
                tensor.mul_(to_host(factor) if isinstance(factor, Tensor) and factor.is_cuda else factor)
            return c10d.ReduceOp.SUM, _nothing
        return c10d.ReduceOp(op), _nothing

    def issued(self, works: Sequence[Any], result: Any, finish: Callable[[], object] = _nothing) -> Any:
        """Returns the work of a collective whose future gives tensors on their GPU."""
        cards: list[Any] = sorted({tensor.device for tensor in self.tensors}, key=str) or [torch.device("cuda", 0)]
        future: Any = torch.futures.Future(devices=cards)
        left = len(works)

        def ended(one: Any) -> None:
            nonlocal left
            left -= 1
            try:
                one.value()
                if left == 0:
                    finish()
                    future.set_result(result)
            except Exception as error:  # noqa: BLE001  (the work raises it where it is waited for)
                if not future.done():
                    future.set_exception(error)

        for work in works:
            work.get_future().add_done_callback(ended)
        return _work_of(future).boxed()


COLLECTIVES: dict[str, Callable[..., Any]] = {}  # by the name of the operator


def _collective(kernel: Callable[..., Any]) -> Callable[..., Any]:
    COLLECTIVES[kernel.__name__] = kernel
    return kernel


@_collective
def allreduce_(tensors: Any, group: Any, op: Any, sparse: Any = None, async_op: bool = True, timeout: int = -1) -> Any:
    return tensors, allreduce_coalesced_(tensors, group, op, async_op, timeout)


@_collective
def allreduce_coalesced_(tensors: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1) -> Any:
    own, host = _Group(group, tensors, timeout), _host(tensors)
    known, finish = own.reduction(op, host, host)
    options = own.options(c10d.AllreduceOptions, reduceOp=known)
    return own.issued([own.backend.allreduce([tensor], options) for tensor in host], tensors, finish)


@_collective
def broadcast_(tensors: Any, group: Any, root: int, place: int, async_op: bool = True, timeout: int = -1) -> Any:
    own = _Group(group, tensors, timeout)
    options = own.options(c10d.BroadcastOptions, rootRank=root, rootTensor=place)
    return tensors, own.issued([own.backend.broadcast(_host(tensors), options)], tensors)


@_collective
def reduce_(tensors: Any, group: Any, op: Any, root: int, place: int, async_op: bool = True, timeout: int = -1) -> Any:
    own, host = _Group(group, tensors, timeout), _host(tensors)
    known, finish = own.reduction(op, host, host if own.backend.rank() == root else ())
    options = own.options(c10d.ReduceOptions, reduceOp=known, rootRank=root, rootTensor=place)
    return own.issued([own.backend.reduce(host, options)], tensors, finish)


@_collective
def allgather_(outputs: Any, inputs: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
    own = _Group(group, (outputs, inputs), timeout)
    work = own.backend.allgather(_host(outputs), _host(inputs), own.options(c10d.AllgatherOptions))
    return outputs, own.issued([work], outputs)


@_collective
def _allgather_base_(output: Any, given: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
    if output.numel() != given.numel() * dist.ProcessGroup.unbox(group).size():
        raise ValueError("output tensor size must be equal to world_size times input tensor size")
    return output, allgather_into_tensor_coalesced_([output], [given], group, async_op, timeout)


@_collective
def allgather_into_tensor_coalesced_(
    outputs: Any, inputs: Any, group: Any, async_op: bool = True, timeout: int = -1
) -> Any:
    own = _Group(group, (outputs, inputs), timeout)
    options, size = own.options(c10d.AllgatherOptions), own.backend.size()
    works = [
        own.backend.allgather([list(_host(output).view(-1).chunk(size))], [_host(given).reshape(-1)], options)
        for output, given in zip(outputs, inputs, strict=True)
    ]
    return own.issued(works, outputs)


@_collective
def allgather_coalesced_(outputs: Any, inputs: Any, group: Any, async_op: bool = True) -> Any:
    own = _Group(group, (outputs, inputs))
    options = own.options(c10d.AllgatherOptions)
    works = [
        own.backend.allgather([[_host(rank[place]) for rank in outputs]], [_host(given)], options)
        for place, given in enumerate(inputs)
    ]
    return own.issued(works, tensors_in(outputs))


@_collective
def reduce_scatter_(outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1) -> Any:
    own = _Group(group, (outputs, inputs), timeout)
    return outputs, _reduce_scatter(own, outputs, inputs, op)


@_collective
def _reduce_scatter_base_(
    output: Any, given: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Any:
    if given.numel() != output.numel() * dist.ProcessGroup.unbox(group).size():
        raise ValueError("input tensor must be the same size as output size times world size")
    return output, reduce_scatter_tensor_coalesced_([output], [given], group, op, async_op, timeout)


@_collective
def reduce_scatter_tensor_coalesced_(
    outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Any:
    own = _Group(group, (outputs, inputs), timeout)
    return _reduce_scatter(own, outputs, [given.view(-1).chunk(own.backend.size()) for given in inputs], op)


def _reduce_scatter(own: _Group, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: Any) -> Any:
    """Adds by an all-reduce of a copy, of which each rank keeps its part: gloo has no reduce-scatter for all types."""
    works: list[Any] = []
    finishes: list[Callable[[], object]] = []
    for output, parts in zip(outputs, inputs, strict=True):
        whole = torch.cat([_host(part).reshape(-1) for part in parts])
        known, divide = own.reduction(op, [whole], [whole])
        works.append(own.backend.allreduce([whole], own.options(c10d.AllreduceOptions, reduceOp=known)))
        start = sum(part.numel() for part in parts[: own.backend.rank()])
        part = whole[start : start + output.numel()]
        finishes += [divide, partial(_host(output).view(-1).copy_, part)]
    return own.issued(works, outputs, lambda: [finish() for finish in finishes])


@_collective
def gather_(outputs: Any, inputs: Any, group: Any, root: int, async_op: bool = True, timeout: int = -1) -> Any:
    own = _Group(group, (outputs, inputs), timeout)
    work = own.backend.gather(_host(outputs), _host(inputs), own.options(c10d.GatherOptions, rootRank=root))
    return own.issued([work], tensors_in(outputs))


@_collective
def scatter_(outputs: Any, inputs: Any, group: Any, root: int, async_op: bool = True, timeout: int = -1) -> Any:
    own = _Group(group, (outputs, inputs), timeout)
    work = own.backend.scatter(_host(outputs), _host(inputs), own.options(c10d.ScatterOptions, rootRank=root))
    return outputs, own.issued([work], outputs)


@_collective
def alltoall_base_(
    output: Any, given: Any, group: Any, into: Any, out_of: Any, async_op: bool = True, timeout: int = -1
) -> Any:
    own = _Group(group, (output, given), timeout)
    options = own.options(c10d.AllToAllOptions)
    work = own.backend.alltoall_base(_host(output), _host(given), list(into), list(out_of), options)
    return own.issued([work], [output])


@_collective
def alltoall_(outputs: Any, inputs: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
    own = _Group(group, (outputs, inputs), timeout)
    received = torch.cat([torch.empty_like(_host(one)).reshape(-1) for one in outputs])
    sent = torch.cat([_host(one).reshape(-1) for one in inputs])
    sizes = [[one.numel() for one in side] for side in (outputs, inputs)]
    work = own.backend.alltoall_base(received, sent, *sizes, own.options(c10d.AllToAllOptions))

    def finish() -> None:
        for one, part in zip(outputs, received.split(sizes[0]), strict=True):  # type: ignore[no-untyped-call]
            _host(one).view(-1).copy_(part)

    return outputs, own.issued([work], outputs, finish)


@_collective
def barrier(tensor: Any, group: Any, device_ids: Any, async_op: bool = True, timeout: int = -1) -> Any:
    own = _Group(group, [tensor], timeout, pair=True)  # before other collectives NCCL takes GPU rank % count for it
    return own.issued([own.backend.barrier(own.options(c10d.BarrierOptions))], [])


def _between_two(name: str) -> Callable[..., Any]:
    def kernel(tensors: Any, group: Any, *rank_and_tag: int) -> Any:
        own = _Group(group, tensors, pair=True)
        backend = own.backend
        if not own.is_nccl:
            raise RuntimeError(
                f"gloo cannot {name.removesuffix('_anysource')} a GPU's tensor (on a real GPU: 'Bad address'): "
                "copy it to the CPU, or use nccl"
            )
        return getattr(backend, name)(_host(tensors), *rank_and_tag).boxed()

    return kernel


COLLECTIVES |= {
    "send": _between_two("send"),
    "recv_": _between_two("recv"),
    "recv_any_source_": _between_two("recv_anysource"),
}


@around
def _premul(original: Callable[..., Any], factor: Any) -> Any:
    _factor[:] = [factor]
    return original(factor)


def patch_groups(patches: Patches) -> None:
    made: Any = dist.distributed_c10d
    patches.set(made, "_NCCL_AVAILABLE", True)
    patches.set(made, "ProcessGroupNCCL", ProcessGroupNCCL)
    patches.set(dist, "ProcessGroupNCCL", ProcessGroupNCCL)
    patches.set(c10d.Logger, "set_runtime_stats_and_log", lambda _logger: None)  # it would read CUDA's clock
    premul: Any = dist.__dict__["_make_nccl_premul_sum"]
    patches.exchange("torch", {premul: _premul(premul)})
    if made.default_pg_nccl_timeout is None:
        for module in (dist.constants, made):
            patches.set(module, "default_pg_nccl_timeout", timedelta(minutes=10))  # NCCL's own
