"""Parameters in FullyShardedDataParallel (FSDP1), by the names and shapes that they have without it.

It puts all parameters of a module into one vector and cuts that over the ranks, wherever a parameter ends. In one
process, and with NO_SHARD, nothing is cut. Where a parameter lies is FSDP's own metadata, which is not public.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from samestep.verification.recording.parts import Part

_NEEDED = ("_fqns", "_shapes", "_strides", "_shard_param_infos", "_sharded_size")


@dataclass(frozen=True, eq=False)
class FlatSlice:
    """One parameter, as a rank holds it; has what a parameter has."""

    name: str  # within its FSDP module
    owner: Tensor  # what an optimizer holds of it: the flat parameter, or a parameter of its own
    flat: Any  # the flat parameter that it lies in
    index: int  # its number there
    is_cut: bool  # whether ranks hold different numbers of it

    @property
    def shape(self) -> torch.Size:
        """The whole parameter's."""
        shape: torch.Size = self.flat._shapes[self.index]  # noqa: SLF001
        return shape

    @property
    def requires_grad(self) -> bool:
        return self.owner.requires_grad

    @property
    def data(self) -> Tensor | Part:
        """Its numbers here, also while FSDP has gathered the others: a view, in its own shape where nothing is cut."""
        own, kept = self.owner.data, getattr(self.flat, "_local_shard", None)
        if kept is not None and (own.shape != self._local_shape or own.dtype != kept.dtype):
            return self._within(kept)
        return self._of(own)

    @property
    def grad(self) -> Any:
        """Its gradient, likewise."""
        return self.of(self.owner.grad)

    def of(self, value: Any) -> Any:
        """Returns what is of this parameter in a value of its owner, such as a momentum; a scalar stays as it is."""
        if value is None and self.is_cut and not self._info.in_shard:
            return self._nothing(self.owner)  # other ranks have it, or none
        return self._of(value.data) if getattr(value, "shape", None) == self._local_shape else value

    def _of(self, local: Tensor) -> Tensor | Part:
        if local.shape != self._local_shape:
            return local
        if self._is_flat:
            return self._within(local)
        return self._placed(local) if self.is_cut else local

    def _within(self, flat: Tensor) -> Tensor | Part:
        info = self._info
        if not info.in_shard:
            return self._nothing(flat)
        return self._placed(flat[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard])

    def _placed(self, numbers: Tensor) -> Tensor | Part:
        strides: tuple[int, ...] = tuple(self.flat._strides[self.index])  # noqa: SLF001
        if not self.is_cut:
            return numbers.as_strided(self.shape, strides)
        if not self._info.in_shard:
            return self._nothing(numbers)
        return Part(tuple(self.shape), (self._info.intra_param_start_idx,), numbers, strides)

    def _nothing(self, like: Tensor) -> Part:
        return Part(tuple(self.shape), None, like.new_empty(0))

    @property
    def _is_flat(self) -> bool:
        return id(self.owner) == id(self.flat)

    @property
    def _info(self) -> Any:
        return self.flat._shard_param_infos[self.index]  # noqa: SLF001

    @property
    def _local_shape(self) -> torch.Size:
        if self._is_flat:
            size: torch.Size = self.flat._sharded_size  # noqa: SLF001
            return size
        return torch.Size([self._info.numel_in_shard or 0]) if self.is_cut else self.shape


def slices(root: nn.Module) -> Iterator[FlatSlice]:
    """Yields the parameters that FSDP modules in a model hold, the root's among them, where it is known how."""
    for path, handle in _handles(root):
        flat = handle.flat_param
        if _why_unknown(flat) is not None:
            continue
        owners = flat._params or [flat] * len(flat._fqns)  # noqa: SLF001
        for index, (name, owner) in enumerate(zip(flat._fqns, owners, strict=True)):  # noqa: SLF001
            yield FlatSlice(f"{path}.{name}" if path else name, owner, flat, index, handle.uses_sharded_strategy)


def dtype(module: nn.Module) -> torch.dtype | None:
    """Returns the type of the parameters that an FSDP module holds itself; None for any other module."""
    handle: Any = getattr(module, "_handle", None) if isinstance(module, _classes()) else None
    return None if handle is None else cast("torch.dtype", handle.flat_param.dtype)


def why_unknown(model: nn.Module) -> str | None:
    """Returns why the places of the parameters of a model in FSDP are not known; None where they are."""
    return next(filter(None, (_why_unknown(handle.flat_param) for _, handle in _handles(model))), None)


def _why_unknown(flat: Any) -> str | None:
    if any(not hasattr(flat, name) for name in _NEEDED):
        return "this version of torch does not tell where FullyShardedDataParallel keeps a parameter"
    if any(one is not None for one in getattr(flat, "_param_extensions", ())):
        return "FullyShardedDataParallel cuts parameters that tensor parallelism has cut before"
    return None


def _handles(root: nn.Module) -> Iterator[tuple[str, Any]]:
    classes = _classes()
    for path, module in root.named_modules() if classes else ():
        handle = getattr(module, "_handle", None) if isinstance(module, classes) else None
        if handle is not None:
            yield path, handle


def _classes() -> tuple[type, ...]:
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return () if module is None else (module.FullyShardedDataParallel,)
