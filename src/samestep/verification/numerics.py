"""How far two gradients are apart, and whether that is rounding.

A tensor's error is the norm of the difference over the norm of the tensor; small tensors are compared with the whole
gradient. Rounding is measured: the same step with its samples in another order (Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., ch. 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor | None]  # by the parameters' names

ABOVE_FLOOR = 20.0  # an error so many times the measured floor is no rounding any more
ROUNDINGS = 1e3  # nor is one of so many units in the last place, where the floor happens to be lower
_ROUNDINGS_OF_DOUBLE = 1e6  # no finer type tells rounding from a mistake there, and a mistake is larger than _EXACT
ROUNDINGS_OF_HALF = 8.0  # of a type of 16 bits, in which no more is computed than that leaves right
_HALF = 1e-4  # the unit roundoff of such a type is larger
_DOUBLE = 1e-15  # that of float64 is smaller
_SMALL = 1e-2  # of the whole gradient's size a number; a tensor with less is held against this
_NEAR = 0.1  # of a tensor's norm: so far from a multiple of another it may be, and rounding is measured afterwards
_OF_BUFFERS = 1e-3  # of a buffer's norm
COARSEST = 1e-3  # a floor above it hides real mistakes
STEPS_IN_FLOAT64 = 20  # in which an accusation is looked at again
MOST_ROUNDING = 1e-2  # of a tensor's norm; a larger error may be a mistake that another run does not repeat
_EXACT = 1e-7  # in float64 a mistake is larger
_SHRINKS = 1e-4  # in float64 rounding is 2e-9 times what it is in float32; a mistake is as large as before


@dataclass(frozen=True)
class Distance:
    """How far gradients are apart: the worst tensor's error, its name, the error of all together, and each error."""

    worst: float
    tensor: str
    whole: float
    errors: Mapping[str, float] = field(default_factory=dict)


def distance(these: Gradients, reference: Gradients) -> Distance:
    """Returns how far `these` are from the `reference`; a gradient that only one of them has counts as zeros.

    Tensors of other sizes are infinitely far apart.
    """
    pairs = {name: _pair(these.get(name), reference.get(name)) for name in _names(these, reference)}
    norms = {name: float(other.norm()) for name, (_, other) in pairs.items()}
    whole = math.sqrt(sum(norm * norm for norm in norms.values()))
    numbers = sum(other.numel() for _, other in pairs.values()) or 1
    errors = {
        name: float((one - other).norm()) if len(one) == len(other) else math.inf
        for name, (one, other) in pairs.items()
    }
    total = math.sqrt(sum(error * error for error in errors.values())) / max(whole, 1e-300)
    relative = {}
    for name, (_, other) in pairs.items():
        scale = max(norms[name], _SMALL * whole * math.sqrt(other.numel() / numbers), 1e-300)
        relative[name] = errors[name] / scale if math.isfinite(errors[name]) else math.inf
    worst = max(relative, key=relative.__getitem__, default="")
    if math.isinf(relative.get(worst, 0.0)):
        total = math.inf
    return Distance(relative.get(worst, 0.0), worst, total, relative)


def _names(one: Gradients, other: Gradients) -> list[str]:
    return [*one, *(name for name in other if name not in one)]


def _pair(one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor]:
    if one is None and other is None:
        nothing = torch.zeros(0, dtype=torch.float64)
        return nothing, nothing
    if one is None:
        assert other is not None
        return torch.zeros_like(vector(other)), vector(other)
    return vector(one), torch.zeros_like(vector(one)) if other is None else vector(other)


def vector(tensor: Tensor) -> Tensor:
    """Returns a tensor's numbers in float64, shape [numbers]; of a complex one both parts."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    dense = dense.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense  # double() drops what is imaginary
    return real.double().flatten()


def flat(gradients: Gradients, *like: Gradients) -> Tensor:
    """Returns all gradients as one vector, shape [numbers], by name; those that only `like` have are zeros.

    >>> flat({"b": torch.ones(1)}, {"a": torch.ones(2)}).tolist()
    [0.0, 0.0, 1.0]
    """
    shaped = {name: one for known in (*like, gradients) for name, one in known.items() if one is not None}
    return torch.cat(
        [_pair(gradients.get(name), shaped[name])[0] for name in sorted(shaped)]
        or [torch.zeros(0, dtype=torch.float64)]
    )


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
    if not all(bool(torch.isfinite(one).all()) for one in [target, *parts]):
        return Fit((math.nan,) * len(parts), math.inf)
    basis = torch.stack(list(parts), dim=1)
    scale = basis.norm(dim=0).clamp_min(1e-300)
    scaled = basis / scale
    solved = torch.linalg.lstsq(scaled, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = float((scaled @ solved - target).norm() / target.norm().clamp_min(1e-300))
    return Fit(tuple((solved / scale).tolist()), left)


def mean(parts: Sequence[Gradients]) -> dict[str, Tensor | None]:
    """Returns the mean of some gradients; one that a part lacks counts as zeros there.

    >>> mean([{"w": torch.ones(1)}, {"w": None}])
    {'w': tensor([0.5000])}
    """
    found: dict[str, Tensor | None] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        present = [one for part in parts if (one := part.get(name)) is not None]
        found[name] = sum(present[1:], present[0]) / len(parts) if present else None
    return found


def nearest(these: Gradients, reference: Gradients, size: int) -> tuple[dict[str, Tensor | None], set[float]]:
    """Returns of each tensor itself, its `size`-fold or its part by `size`, and which of these factors there are.

    It is the multiple that is near the reference; where none is, the tensor itself.

    >>> nearest({"w": torch.full((2,), 6.0)}, {"w": torch.full((2,), 3.0)}, size=2)
    ({'w': tensor([3., 3.])}, {0.5})
    """
    found: dict[str, Tensor | None] = {}
    factors = set()
    for name, one in these.items():
        other = reference.get(name)
        found[name] = one
        if one is None or other is None or one.shape != other.shape:
            continue
        mine, theirs = vector(one), vector(other)
        errors = {factor: float((mine * factor - theirs).norm()) for factor in (1.0, 1 / size, float(size))}
        factor = min(errors, key=errors.__getitem__)
        if errors[factor] < _NEAR * float(theirs.norm()):
            found[name] = one if factor == 1.0 else one * factor
            factors.add(factor)
    return found, factors


def in_turns(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Returns the whole of which part i is `whole[i::len(parts)]` along a dim.

    >>> in_turns([torch.tensor([0, 2, 4]), torch.tensor([1, 3])]).tolist()
    [0, 1, 2, 3, 4]
    """
    places = torch.cat([torch.arange(part.shape[dim]) for part in parts])
    return torch.cat(list(parts), dim).index_select(dim, torch.argsort(places, stable=True))


def are_finite(gradients: Gradients) -> bool:
    """Returns whether no gradient has a NaN or an infinity."""
    return all(one is None or bool(torch.isfinite(vector(one)).all()) for one in gradients.values())


def are_zero(gradients: Gradients) -> bool:
    """Returns whether every gradient is missing or exactly zero.

    >>> are_zero({"bias": None, "weight": torch.zeros(2)}), are_zero({"weight": torch.tensor([0.0, math.nan])})
    (True, False)
    """
    return not any(bool(vector(one).any()) for one in gradients.values() if one is not None)


def unit(gradients: Gradients) -> float:
    """Returns the unit roundoff of the coarsest type among the gradients."""
    types = {
        one.dtype for one in gradients.values() if one is not None and (one.is_floating_point() or one.is_complex())
    }
    return max((torch.finfo(dtype).eps / 2 for dtype in types), default=0.0)


def limit(floor: float, gradients: Gradients, coarsest: float = 0.0) -> float:
    """Returns the largest error that rounding explains.

    Args:
        floor: that was measured.
        gradients: which are rounded to their type.
        coarsest: unit roundoff of a type that they were computed in.

    >>> limit(0.0, {"w": torch.ones(1)}) < 1e-4 < limit(0.0, {"w": torch.ones(1)}, coarsest=2**-11) < 1e-2
    True
    >>> limit(0.0, {"w": torch.ones(1, dtype=torch.float64)}) < 1e-9
    True
    """
    coarsest = max(coarsest, unit(gradients))
    by_type = ((_HALF, ROUNDINGS_OF_HALF), (_DOUBLE, ROUNDINGS), (0.0, _ROUNDINGS_OF_DOUBLE))
    roundings = next((most for least, most in by_type if coarsest > least), 0.0)
    return max(ABOVE_FLOOR * floor, roundings * coarsest)


def differ(mine: Tensor, theirs: Tensor) -> bool:
    """Returns whether two values of a buffer differ by more than rounding; numbers without a fraction never do.

    >>> differ(torch.ones(2), torch.ones(2) + 1e-5), differ(torch.ones(2), torch.tensor([1.0, 1.5]))
    (False, True)
    """
    if mine.shape != theirs.shape or not mine.is_floating_point() or not mine.numel():
        return False
    return bool((mine.double() - theirs.double()).norm() > _OF_BUFFERS * theirs.double().norm().clamp_min(1e-12))


def is_rounding(error: float, in_float64: float) -> bool:
    """Whether an error in float32 is rounding, since the same step in float64 has hardly any.

    >>> is_rounding(7e-4, 1e-12), is_rounding(7e-4, 6.9e-4)
    (True, False)
    """
    return in_float64 <= min(_SHRINKS * error, _EXACT)


def is_too_coarse(floor: float, gradients: Gradients, coarsest: float = 0.0) -> bool:
    """Whether rounding alone is so large that a mistake could hide in it; arguments as of :func:`limit`."""
    return max(floor, max(coarsest, unit(gradients)) * 10) > COARSEST


def are_padded(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors hold the same numbers, each as often, but for the one that fills them up.

    So it is with texts of several lengths, which two batches fill up to the longest of each.
    """
    (values, counts), (others, other_counts) = (torch.unique(each, return_counts=True) for each in (one, other))
    return torch.equal(values, others) and int((counts != other_counts).sum()) == 1
