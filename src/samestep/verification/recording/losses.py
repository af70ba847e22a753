"""What a loss is made of, as autograd's graph shows it: a sum of means and sums, each with a constant factor.

    loss = cross_entropy(logits, labels) / 4 + 0.1 * mse_loss(a, b)
    terms: {"factor": 0.25, "mean": true, "count": 32.0, …}, {"factor": 0.1, "mean": true, "count": 512.0, …}

A mean over as many values on each rank may be averaged over ranks; a sum may not, nor may means over different counts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__: list[str] = []

_MOST_NODES = 32  # of a graph, from the root on
_SUMS = {"AddBackward0": 1.0, "SubBackward0": -1.0}  # and the sign of what is added second


def terms_of(root: Any) -> list[dict[str, Any]]:
    """Returns the terms of a loss before its backward pass; none where they cannot be told.

    >>> import torch
    >>> values = torch.ones(2, 3, requires_grad=True)
    >>> terms_of(values.mean() / 4)
    [{'factor': 0.25, 'mean': True, 'count': 6.0, 'shape': [2, 3]}]
    >>> terms_of(values.sum() / 4)
    [{'factor': 0.25, 'mean': False, 'count': None, 'shape': [2, 3]}]
    """
    tensor = root[0] if isinstance(root, list | tuple) and len(root) == 1 else root
    if not isinstance(tensor, Tensor) or tensor.dim() or tensor.grad_fn is None:
        return []
    found: list[dict[str, Any]] = []
    left: list[tuple[Any, float]] = [(tensor.grad_fn, 1.0)]
    for _ in range(_MOST_NODES):
        if not left:
            return found
        node, factor = left.pop(0)
        before = [one for one, _ in node.next_functions if one is not None]
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


def _constant(node: Any) -> float | None:
    """By which number a node multiplies what is before it; None where it does something else."""
    number = getattr(node, "_saved_other", None)
    if type(node).__name__ not in {"MulBackward0", "DivBackward0"} or number is None or number.numel() != 1:
        return None
    is_divisor = type(node).__name__ == "DivBackward0"
    if number.requires_grad or (is_divisor and not float(number)):
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
