"""What autograd's graph shows before a backward pass: the leaves that get gradients, and the terms of a loss.

loss = cross_entropy(logits, labels) / 4 + 0.1 * mse_loss(a, b)
terms: {"factor": 0.25, "mean": true, "count": 32.0, …}, {"factor": 0.1, "mean": true, "count": 512.0, …}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from samestep.verification.recording.containers import tensors_of

_MOST_NODES = 32  # of a graph, from the root on
_MOST_LINKS = 8
_SUMS = {"AddBackward0": 1.0, "SubBackward0": -1.0}  # and the sign of what is added second


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


def scale_of(root: Any) -> dict[str, Any]:
    """Returns by which constant a loss was multiplied before its backward pass, and what kind of loss it is.

    A division by 4 is `(mean of the batch) ÷ 4`: {"factor": 0.25, "loss": "NllLossBackward0"}. Only a chain of
    multiplications and divisions by numbers is seen, from the root on.
    """
    tensor = _loss(root)
    if tensor is None:
        return {}
    node: Any = tensor.grad_fn
    factor = 1.0
    for _ in range(_MOST_LINKS):
        number, before = _constant(node), _before(node)
        if number is None or len(before) != 1:
            break
        factor *= number
        node = before[0]
    mean = getattr(node, "_saved_reduction", 1) == 1  # of a loss function; torch's number for "mean"
    return {"loss": type(node).__name__, "factor": factor, "mean": mean, "value": float(tensor.detach())}


def terms_of(root: Any) -> list[dict[str, Any]]:
    """Returns the terms of a loss, each a mean or a sum with a constant factor; empty if the graph does not show them.

    A mean over as many values on each rank may be averaged over ranks; a sum may not, nor may means over different
    counts.

    >>> import torch
    >>> values = torch.ones(2, 3, requires_grad=True)
    >>> terms_of(values.mean() / 4)
    [{'factor': 0.25, 'mean': True, 'count': 6.0, 'shape': [2, 3]}]
    >>> terms_of(values.sum() / 4)
    [{'factor': 0.25, 'mean': False, 'count': None, 'shape': [2, 3]}]
    """
    tensor = _loss(root)
    if tensor is None:
        return []
    found: list[dict[str, Any]] = []
    left: list[tuple[Any, float]] = [(tensor.grad_fn, 1.0)]
    for _ in range(_MOST_NODES):
        if not left:
            return found
        node, factor = left.pop(0)
        before = _before(node)
        name = type(node).__name__
        if name in _SUMS:
            scale = getattr(node, "_saved_alpha", 1)
            factors = [factor, factor * _SUMS[name] * float(scale)][: len(before)]
            left += zip(before, factors, strict=True)
        elif (number := _constant(node)) is not None and len(before) == 1:
            left.append((before[0], factor * number))
        elif name != "NegBackward0" or len(before) != 1:
            found.append({"factor": factor, **_reduced(node)})
        else:
            left.append((before[0], -factor))
    return []


def _loss(root: Any) -> Tensor | None:
    tensor = root[0] if isinstance(root, list | tuple) and len(root) == 1 else root
    return tensor if isinstance(tensor, Tensor) and not tensor.dim() and tensor.grad_fn is not None else None


def _before(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one is not None]


def _constant(node: Any) -> float | None:
    """By which number a node multiplies what is before it; None where it does something else."""
    number = getattr(node, "_saved_other", None)
    if type(node).__name__ not in {"MulBackward0", "DivBackward0"} or number is None or number.numel() != 1:
        return None
    is_divisor = type(node).__name__ == "DivBackward0"
    if number.requires_grad or (is_divisor and not float(number)):  # a mean of nothing is NaN, and no constant
        return None
    return 1 / float(number) if is_divisor else float(number)


def _reduced(node: Any) -> dict[str, Any]:
    """Whether a term is a mean, of how many values, and the shape of these."""
    reduction = getattr(node, "_saved_reduction", None)
    is_mean = type(node).__name__ == "MeanBackward0" if reduction is None else reduction == 1
    try:
        shape = list(getattr(node, "_saved_self_sym_sizes", None) or node._saved_self.shape)  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return {"mean": False, "count": None, "shape": None}
    weight = getattr(node, "_saved_total_weight", None)
    count = 1.0
    for size in shape:
        count *= int(size)
    if weight is not None:
        count = float(weight)
    return {"mean": is_mean, "count": count if is_mean else None, "shape": [int(size) for size in shape]}
