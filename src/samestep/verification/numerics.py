"""How far two gradients are apart, and whether that is rounding.

The error of a sum scales with the sizes of what is added, not with the size of the sum, so elements are not compared
one by one: a tensor's error is the norm of the difference over the norm of the tensor, where tensors that are nearly
zero are held against the whole gradient. Rounding is measured: the same step with its samples in another order
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., ch. 4: an error bound in any order of summation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__: list[str] = []

Gradients = Sequence[Tensor | None]

ABOVE_FLOOR = 20.0  # an error so many times the measured floor is no rounding any more
ROUNDINGS = 1e3  # nor is one of so many units in the last place, where the floor happens to be lower
_SMALL = 1e-2  # of the whole gradient's size a number; a tensor with less is held against this
COARSEST = 1e-3  # a floor above it hides real mistakes
STEPS_IN_FLOAT64 = 20  # in which an accusation is looked at again
MOST_ROUNDING = 1e-2  # of a tensor's norm; a larger error may be a mistake that another run does not repeat
_EXACT = 1e-7  # in float64 a mistake is larger
_SHRINKS = 1e-4  # in float64 rounding is 2e-9 times what it is in float32; a mistake is as large as before


@dataclass(frozen=True)
class Distance:
    """How far gradients are apart: the worst tensor's error, its place, and the error of all together."""

    worst: float
    tensor: int
    whole: float


def distance(these: Gradients, reference: Gradients) -> Distance:
    """Returns how far `these` are from the `reference`; a gradient that only one of them has counts as zeros."""
    pairs = [_pair(one, other) for one, other in zip(these, reference, strict=True)]
    norms = [float(other.norm()) for _, other in pairs]
    whole = math.sqrt(sum(norm * norm for norm in norms))
    numbers = sum(other.numel() for _, other in pairs) or 1
    errors = [float((one - other).norm()) for one, other in pairs]
    if not all(map(math.isfinite, errors)):
        bad = next(i for i, error in enumerate(errors) if not math.isfinite(error))
        return Distance(math.inf, bad, math.inf)
    scales = [
        max(norm, _SMALL * whole * math.sqrt(other.numel() / numbers), 1e-300)
        for norm, (_, other) in zip(norms, pairs, strict=True)
    ]
    relative = [error / scale for error, scale in zip(errors, scales, strict=True)]
    at = max(range(len(relative)), key=relative.__getitem__, default=0)
    total = math.sqrt(sum(error * error for error in errors)) / max(whole, 1e-300)
    return Distance(relative[at] if relative else 0.0, at, total)


def _pair(one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor]:
    if one is None and other is None:
        nothing = torch.zeros(0, dtype=torch.float64)
        return nothing, nothing
    if one is None:
        assert other is not None
        return torch.zeros_like(_flat(other)), _flat(other)
    return _flat(one), torch.zeros_like(_flat(one)) if other is None else _flat(other)


def _flat(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    dense = dense.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense  # double() drops what is imaginary
    return real.double().flatten()


def flat(gradients: Gradients, like: Gradients) -> Tensor:
    """Returns all gradients as one vector, shape [numbers]; `like` says how long the missing ones are."""
    return torch.cat([_pair(one, other)[0] for one, other in zip(gradients, like, strict=True)])


@dataclass(frozen=True)
class Fit:
    """The multiples of some gradients that come nearest to another, and what is left, relative to it."""

    factors: tuple[float, ...]
    left: float


def fit(target: Tensor, parts: Sequence[Tensor]) -> Fit:
    """Returns the combination of `parts`, shape [numbers] each, that comes nearest to `target`.

    Of what is not finite there is none: the factors are NaN, and everything is left.

    >>> fit(torch.tensor([2.0, 0.0]).double(), [torch.tensor([4.0, 0.0]).double()]).factors
    (0.5,)
    """
    if not are_finite([target, *parts]):
        return Fit((math.nan,) * len(parts), math.inf)
    basis = torch.stack(list(parts), dim=1)
    scale = basis.norm(dim=0).clamp_min(1e-300)
    scaled = basis / scale
    solved = torch.linalg.lstsq(scaled, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = float((scaled @ solved - target).norm() / target.norm().clamp_min(1e-300))
    return Fit(tuple((solved / scale).tolist()), left)


def are_finite(gradients: Gradients) -> bool:
    """Returns whether no gradient has a NaN or an infinity."""
    return all(one is None or bool(torch.isfinite(_flat(one)).all()) for one in gradients)


def are_zero(gradients: Gradients) -> bool:
    """Returns whether every gradient is missing or exactly zero.

    >>> are_zero([None, torch.zeros(2)]), are_zero([torch.tensor([0.0, math.nan])])
    (True, False)
    """
    return not any(bool(_flat(one).any()) for one in gradients if one is not None)


def unit(gradients: Gradients) -> float:
    """Returns the unit roundoff of the coarsest type among the gradients."""
    return max((torch.finfo(one.dtype).eps / 2 for one in gradients if one is not None), default=0.0)


def limit(floor: float, gradients: Gradients) -> float:
    """Returns the largest error that rounding explains, where `floor` was measured."""
    return max(ABOVE_FLOOR * floor, ROUNDINGS * unit(gradients))


def is_rounding(error: float, in_float64: float) -> bool:
    """Whether an error in float32 is rounding, since the same step in float64 has hardly any.

    >>> is_rounding(7e-4, 1e-12), is_rounding(7e-4, 6.9e-4)
    (True, False)
    """
    return in_float64 <= min(_SHRINKS * error, _EXACT)


def is_too_coarse(floor: float, gradients: Gradients) -> bool:
    """Whether rounding alone is so large that a mistake could hide in it."""
    return max(floor, unit(gradients) * 10) > COARSEST
