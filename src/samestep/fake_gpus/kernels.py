"""What computes on fake GPUs: every operator of PyTorch on tensors of a fake GPU runs its CPU kernel on the same bytes.

A fallback for the dispatch key `CUDA` catches the operators that have no kernel for it. Operators that PyTorch composes
of others, for all devices alike, are caught too: they would take one call into Python for each part, and some look for
kernels of CUDA in C++. Views stay C++'s, whose views share the storage of the tensor that they show.

Here too is what a GPU would refuse: tensors of two devices, a device that is not there, CUDA in a forked process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.fake_gpus import devices
from samestep.fake_gpus.generators import borrowed, draw_from
from samestep.fake_gpus.groups import COLLECTIVES
from samestep.fake_gpus.host_memory import to_fake, to_host
from samestep.fake_gpus.loading import PINNING
from samestep.fake_gpus.models import SYNCHRONISED
from samestep.fake_gpus.notes import around
from samestep.fake_gpus.sparse import KEY, PARTS, copy_sparse, is_part, sparse_to_fake, sparse_to_host, write_sparse

HOST = torch.device("cpu")
NONE = -1
# Operators that change how a tensor is laid out, not what it holds, and views: their C++ serves any device.
LAYOUT = {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"}
LAYOUT |= {"detach_", "resize_as_", "as_strided_"}
# Operators some of whose tensors may lie in host memory, as on a GPU.
MIXED = {"aten::copy_", "aten::_copy_from", "aten::_pad_packed_sequence", "aten::_pack_padded_sequence"}
MIXED |= {"aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::segment_reduce", "aten::_pack_padded_sequence_backward"}
INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"}
INDEXING |= {"aten::_unsafe_index_put", "aten::_index_put_impl"}
HALF = {torch.float16, torch.bfloat16}
SUMS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward"}
SOFTMAX = ("_softmax", "_log_softmax")
OF_ROWS = {"values", "crow_indices", "col_indices", "ccol_indices", "row_indices"}  # parts of compressed sparse tensors
STAYS = {"aten::_pack_padded_sequence": (1,)}  # results that a GPU leaves in host memory, by their place


class _Host:
    """The arguments of one call as they lie in host memory, and the devices that they were on."""

    __slots__ = ("index", "mixed", "on_host")

    def __init__(self, mixed: bool) -> None:
        self.index, self.on_host, self.mixed = NONE, False, mixed

    def tensor(self, value: Tensor) -> Tensor:
        number = value.get_device()
        if number < 0:
            self.on_host |= value.ndim > 0  # a tensor of no dimension may lie in host memory, as a number would
            return value
        if self.index != number:
            if self.index < 0:
                self.index = number
            elif not self.mixed:
                raise devices.two_devices(f"cuda:{self.index}", f"cuda:{number}")
        return sparse_to_host(value) if value.is_sparse else to_host(value)

    def value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
            return [self.tensor(item) if isinstance(item, Tensor) else item for item in value]
        return value


class Kernel:
    """One operator on fake GPUs, and what of its schema matters there."""

    __slots__ = ("_name", "_op", "mixed", "outputs", "seeded", "stays", "writes")

    def __init__(self, op: Any) -> None:
        schema = op._schema  # noqa: SLF001
        is_sum = schema.name in SUMS and not schema.overload_name
        self._op, self._name = _in_float32(op) if is_sum else op, schema.name
        names = [argument.name for argument in schema.arguments]
        written = {
            alias: (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for alias in argument.alias_info.before_set
        }
        self.writes = tuple(
            None if result.alias_info is None else next(map(written.get, result.alias_info.before_set), None)
            for result in schema.returns
        )
        self.outputs = tuple(argument.name for argument in schema.arguments if argument.is_out)
        self.mixed, self.stays = schema.name in MIXED, STAYS.get(schema.name, ())
        without = NONE if torch.Tag.nondeterministic_seeded in op.tags else None
        self.seeded = names.index("generator") if "generator" in names else without

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Computes the operator in host memory; returns tensors on the device of its arguments."""
        op, on = self._op, _Host(self.mixed)
        host = [on.value(value) for value in args]
        host_kwargs, wanted = kwargs, None
        if kwargs:
            host_kwargs = {name: on.value(value) for name, value in kwargs.items()}
            wanted = host_kwargs.pop("device", None)
            host_kwargs.pop("pin_memory", None)
            for name in self.outputs:
                own = kwargs.get(name)
                if isinstance(own, Tensor) and own.is_cuda and not own.numel():
                    host_kwargs[name] = torch.empty(0, dtype=own.dtype, device=HOST)  # it may be resized
        index = on.index
        if index >= 0:
            devices.check_process()
            if on.on_host and not self.mixed:
                self._refuse(args, kwargs, index)
        if wanted is not None:
            index = NONE if wanted.type == "cpu" else devices.check_index(wanted.index)
        try:
            result = op(*host, **host_kwargs) if self.seeded is None else self._seeded(host, host_kwargs, index)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{self._name} has no CPU kernel for these tensors: fake GPUs cannot run it"
            ) from error
        return self._returned(result, args, kwargs, host, host_kwargs, index)

    def _refuse(self, args: Sequence[Any], kwargs: dict[str, Any], index: int) -> None:
        """Raises, unless what lies in host memory may: the indices of a tensor on a GPU."""
        if self._name in INDEXING:
            if args[0].get_device() < 0:
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            rest = [value for value in (*args[2:], *kwargs.values()) if isinstance(value, Tensor)]
            if all(value.is_cuda or not value.ndim for value in rest):
                return
        raise devices.two_devices(f"cuda:{index}", "cpu")

    def _seeded(self, host: list[Any], kwargs: dict[str, Any], index: int) -> Any:
        place = self.seeded
        assert place is not None
        if index < 0:
            return self._op(*host, **kwargs)
        if place == NONE:
            with borrowed(index):
                return self._op(*host, **kwargs)
        given = host[place] if place < len(host) else kwargs.get("generator")
        generator = draw_from(given, index)
        if place < len(host):
            return self._op(*host[:place], generator, *host[place + 1 :], **kwargs)
        return self._op(*host, **{**kwargs, "generator": generator})

    def _returned(
        self, result: Any, args: Sequence[Any], kwargs: dict[str, Any], host: list[Any], host_kwargs: Any, index: int
    ) -> Any:
        def one(value: Any, place: int) -> Any:
            if isinstance(value, list):
                return [one(item, place) for item in value]
            if not isinstance(value, Tensor) or place in self.stays:
                return value
            writes = self.writes[place]
            if writes is not None:
                position, name = writes
                by_place = position < len(args)
                own = args[position] if by_place else kwargs[name]
                return _resized(own, host[position] if by_place else host_kwargs[name])
            if index < 0:
                return value
            for given, own in zip(host, args, strict=True):
                if given is value:
                    return own
            if value.is_sparse:
                return sparse_to_fake(value, index)
            if value.layout is not torch.strided or value.is_quantized:
                raise _unsupported(self._name, "quantised" if value.is_quantized else str(value.layout))
            return to_fake(value, index)

        if isinstance(result, tuple):
            return tuple(one(value, place) for place, value in enumerate(result))
        return one(result, 0)


@around
def _in_float32(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds up 16-bit numbers in float32, as a GPU does; the CPU's own kernels for them are up to 100 times slower."""
    kinds = {value.dtype for value in args if isinstance(value, Tensor)}
    if len(kinds) > 1 or kinds.isdisjoint(HALF):
        return op(*args, **kwargs)
    result = op(*(value.float() if isinstance(value, Tensor) else value for value in args), **kwargs)
    (half,) = kinds
    if isinstance(result, Tensor):
        return result.to(half)
    return tuple(value if value is None else value.to(half) for value in result)


def _unsupported(name: str, kind: str) -> NotImplementedError:
    return NotImplementedError(f"fake GPUs do not support {kind} tensors, which {name} uses")


def _refuse_rows(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses operators of sparse tensors that are stored by rows, columns or blocks."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.layout is not torch.strided]
    layout = str(tensors[0].layout) if tensors else "compressed sparse"
    raise _unsupported(op._schema.name, layout)  # noqa: SLF001


def _resized(own: Tensor, alias: Tensor) -> Tensor:
    """Returns a tensor that was written into, in the shape that the operator gave its alias: `out=` may be resized."""
    if own.is_sparse and own is not alias:
        return write_sparse(own, alias)
    if own is not alias and own.shape != alias.shape:
        own.set_(to_fake(alias, own.get_device()))  # type: ignore[call-overload]
    return own


class Kernels:
    """Registered with PyTorch's dispatcher from :meth:`install` to :meth:`remove`."""

    def __init__(self) -> None:
        self._libraries: list[Any] = []
        self._by_op: dict[Any, Kernel] = {}
        self._views: set[Any] = set()

    def install(self) -> None:
        """Registers the fallback, and a kernel for each operator that is composed of others."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the dispatcher tells of each kernel that takes another's place
            self._install()

    def _install(self) -> None:
        composed = {name.removeprefix("aten::") for name in _composed()}
        self._register_all("CUDA", self.fallback, composed | _of_cuda(), SPECIAL)
        self._register_all("SparseCUDA", self.sparse_fallback, composed | PARTS, {"copy_": copy_sparse})
        self._register_all("SparseCsrCUDA", _refuse_rows, composed | OF_ROWS, {})
        self._register("c10d", "CUDA", COLLECTIVES)
        self._register("aten", "CPU", PINNING)

    def _register_all(
        self, key: str, fallback: Callable[..., Any], names: set[str], special: dict[str, Callable[..., Any]]
    ) -> None:
        self._register("aten", key, {name: _late(name, fallback) for name in names} | special)
        self._library("_", key).fallback(key, fallback, False)

    def _register(self, namespace: str, key: str, kernels: dict[str, Callable[..., Any]]) -> None:
        library = self._library(namespace, key)
        for name, kernel in kernels.items():
            library.impl(name, key, kernel, False)

    def _library(self, namespace: str, key: str) -> Any:
        library = torch._C._dispatch_library("IMPL", namespace, key, __file__, 0)  # noqa: SLF001
        self._libraries.append(library)
        return library

    def fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self._by_op.get(op)
        if kernel is None:
            if op in self._views or _shows_storage(op):
                self._views.add(op)
                return op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)  # noqa: SLF001
            kernel = self._by_op[op] = Kernel(op)
        return kernel.run(args, kwargs)

    def sparse_fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """What the dispatcher calls for sparse tensors of fake GPUs."""
        return op._op_dk(KEY, *args, **kwargs) if is_part(op) else self.fallback(op, *args, **kwargs)  # noqa: SLF001

    def remove(self) -> None:
        for library in self._libraries:
            library.reset()
        self._libraries.clear()


def _late(name: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel that looks its operator up when it is first called."""
    packet, _, overload = name.partition(".")
    op: Any = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal op
        if op is None:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        return fallback(op, *args, **kwargs)

    return kernel


def _of_cuda() -> set[str]:
    """Returns the names of PyTorch's operators for which this build has a kernel of CUDA: it would ask the driver."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")  # noqa: SLF001
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _shows_storage(op: Any) -> bool:
    """Returns whether an operator gives a view, or sets a tensor's storage: its CPU kernel looks at no device."""
    results = [result.alias_info for result in op._schema.returns]  # noqa: SLF001
    return op._schema.name == "aten::set_" or any(info is not None and not info.is_write for info in results)  # noqa: SLF001


def _composed() -> list[str]:
    """Returns the names of PyTorch's operators on tensors that have one kernel, made of others, for all devices."""
    found = []
    for key in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):  # noqa: SLF001
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            if namespace != "aten" or packet in LAYOUT or packet in SPECIAL or rest in SPECIAL:
                continue
            schema = torch._C._get_schema(f"aten::{packet}", overload)  # noqa: SLF001
            shows = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
            makes = any(argument.name in {"device", "storage"} for argument in schema.arguments)
            if not shows and not makes and packet not in {"set", "resize", "lift", "is_pinned", "set_"}:
                found.append(name)
    return found


def _copy(target: Tensor, source: Tensor, _non_blocking: bool = False) -> Tensor:
    devices.check_process()
    one, other = (to_host(each) if each.is_cuda else each for each in (target, source))
    one.copy_(other)
    return target


def _resize(tensor: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    del memory_format
    count = math.prod(size)
    needed, held = (tensor.storage_offset() + count) * tensor.element_size(), tensor.untyped_storage().nbytes()
    strides = torch.empty(tuple(size), device="meta").stride()
    if needed <= held:
        return tensor.as_strided_(tuple(size), strides)
    fresh = torch.empty(tuple(size), dtype=tensor.dtype)
    kept = min(count, tensor.numel())
    fresh.view(-1)[:kept] = to_host(tensor).reshape(-1)[:kept]
    return tensor.set_(to_fake(fresh, tensor.get_device()))  # type: ignore[call-overload,no-any-return]


def _dropout(tensor: Tensor, probability: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(tensor, dtype=torch.bool)
    if train is False:
        return tensor.clone(), mask.fill_(value=True)
    mask.bernoulli_(1 - probability)
    return tensor * mask * (0.0 if probability == 1 else 1 / (1 - probability)), mask


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: float = 0.0,
    causal: bool = False,
    _mask: bool = False,
    *,
    scale: Any = None,
) -> tuple[Any, ...]:
    """The attention of GPUs for which DTensor has a rule; see :func:`.models.patch_models`."""
    compute = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    output, logsumexp = compute(query, key, value, p, causal, scale=scale)
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return output, logsumexp, None, None, query.shape[2], key.shape[2], random, random[0].clone(), query.new_empty(0)


def _attention_backward(*args: Any, scale: Any = None) -> tuple[Tensor, ...]:
    compute = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
    *tensors, _, _, _, _, p, causal, _, _ = args
    return compute(*tensors, p, causal, scale=scale)  # type: ignore[no-any-return]


@around
def _softmax(compute: Callable[..., Tensor], x: Tensor, dim: int, to_float: bool) -> Tensor:
    """Gives float32 for float16, as autocast asks of a GPU alone."""
    return compute(x.float() if to_float else x, dim, False)


@around
def _softmax_backward(compute: Callable[..., Tensor], dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return compute(dy, y, dim, y.dtype).to(dtype)


@around
def on_host(compute: Callable[..., Any], *args: Any) -> Any:
    """Computes with the host's tensors."""
    on = _Host(mixed=False)
    host = [on.value(value) for value in args]
    devices.check_process()
    if on.on_host:
        raise devices.two_devices(f"cuda:{on.index}", "cpu")
    result = compute(*host)
    if isinstance(result, Tensor):
        return to_fake(result, on.index)
    return tuple(value if value is None else to_fake(value, on.index) for value in result)


SPECIAL: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "resize_": _resize,
    "native_dropout": _dropout,
    "record_stream": lambda *_args: None,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    **{name: on_host(compute) for name, compute in SYNCHRONISED.items()},
    **{name: on_host(_softmax(getattr(torch.ops.aten, name))) for name in SOFTMAX},
    **{
        f"{name}_backward_data": on_host(_softmax_backward(getattr(torch.ops.aten, f"{name}_backward_data")))
        for name in SOFTMAX
    },
}
