"""What a model was called with, kept so that it can be called again, on fewer samples.

model(x, mask, labels=y)        x, y: [64, …]  their first 16 samples        mask: [128, 128]  as it is
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError

__all__: list[str] = []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples and mappings, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def samples_in(value: Any) -> int:
    """Returns dim 0 of the first tensor that has one; 0 without any.

    >>> samples_in(({"ids": torch.zeros(8, 3)}, torch.zeros(5)))
    8
    """
    return next((int(one.shape[0]) for one in tensors_in(value) if one.dim()), 0)


@dataclass(frozen=True)
class Inputs:
    """One call of a model.

    Attributes:
        args: by position; tensors are copies without gradients.
        kwargs: by name, likewise.
        samples: that it was called with.
        autocast: precision that it ran in, by kind of device; None where it ran in its own.
        training: the model was in training mode, which an evaluation behind the last step changes.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    autocast: tuple[str, torch.dtype] | None
    training: bool = True

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool = True) -> Inputs:
        """Keeps a call that is about to be made."""
        copied, named = _changed((args, dict(kwargs)), lambda tensor: tensor.detach().clone())
        first = next(tensors_in((args, kwargs)), None)
        kind = "cpu" if first is None else first.device.type
        on = torch.is_autocast_enabled(kind)
        autocast = (kind, torch.get_autocast_dtype(kind)) if on else None
        return cls(copied, named, samples_in((args, kwargs)), autocast, training)

    def first(self, samples: int) -> Inputs:
        """Returns a call on the first samples: of all tensors that have one row each.

        Raises:
            ModelError: they are in something that cannot be made anew of fewer.

        Example:
            >>> call = Inputs.of((torch.zeros(8, 3), torch.zeros(3, 3)), {"scale": 2})
            >>> [list(one.shape) for one in call.first(2).args]
            [[2, 3], [3, 3]]
        """

        def cut(tensor: Tensor) -> Tensor:
            return tensor[:samples] if tensor.dim() and tensor.shape[0] == self.samples else tensor

        args, kwargs = _changed((self.args, self.kwargs), cut)
        if samples_in((args, kwargs)) != samples:
            raise ModelError("what it is called with cannot be cut into fewer samples")
        return Inputs(args, kwargs, samples, self.autocast, self.training)

    def by_position(self, model: nn.Module) -> list[Tensor] | str:
        """Returns the tensors that the forward takes, all by position; else why they cannot be given so."""
        try:
            bound = inspect.signature(model.forward).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            return "its forward does not say what it takes"
        if bound.kwargs:
            return f"its forward takes {next(iter(bound.kwargs))} by name alone"
        given = list(bound.args)
        while given and given[-1] is None:
            given.pop()
        if not given or not all(isinstance(one, Tensor) for one in given):
            return "its forward takes something else than tensors"
        if not all(one.dim() and one.shape[0] == self.samples for one in given):
            return "its forward takes a tensor that has no row for each sample"
        return given


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested lists, tuples and mappings with other tensors; everything else is as it was."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)((key, _changed(one, change)) for key, one in value.items()) if _plain(value) else value
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    if isinstance(value, tuple):
        found = [_changed(one, change) for one in value]
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    return value


def _plain(value: dict[Any, Any]) -> bool:
    """Whether it is made anew of its items; a class of the user's may be made otherwise."""
    return type(value) in (dict, OrderedDict)
