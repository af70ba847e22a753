"""The leaves of an autograd graph: the tensors whose gradients add up when a backward pass begins at some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def leaves_of(outputs: Any) -> Iterator[Tensor]:
    """Yields them.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> [leaf is weight for leaf in leaves_of((weight * 2).sum())]
    [True]
    """
    nodes = [one.grad_fn for one in tensors_of(outputs) if one.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def unit_of(outputs: Any) -> float:
    """Returns the unit roundoff of the coarsest of them: gradients are rounded to it, whatever the optimizer holds."""
    types = {one.dtype for one in leaves_of(outputs) if one.is_floating_point()}
    return max((torch.finfo(dtype).eps / 2 for dtype in types), default=0.0)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(one)
