"""Rounding is told from mistakes, and a mistake's factor is found."""

from __future__ import annotations

import math

import pytest
import torch

from samestep.verification.numerics import distance, fit, flat, is_too_coarse, limit


def gradients(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(16, 8, generator=generator), "bias": torch.randn(16, generator=generator)}


def test_equal_gradients_have_no_distance() -> None:
    assert distance(gradients(), gradients()).worst == 0.0


def test_the_worst_tensor_is_named() -> None:
    mine = gradients()
    mine["bias"] = mine["bias"] * 1.5
    apart = distance(mine, gradients())
    assert (apart.tensor, apart.worst) == ("bias", pytest.approx(0.5))
    assert apart.errors == {"weight": 0.0, "bias": pytest.approx(0.5)}


def test_a_tensor_of_rounding_errors_is_held_against_the_whole_gradient() -> None:
    mine, other = ({**gradients(), "zero": torch.full((4,), value)} for value in (1e-9, -1e-9))
    assert distance(mine, other).worst < limit(0.0, mine)


def test_a_missing_gradient_counts_as_zeros() -> None:
    first = gradients()
    assert distance({"weight": first["weight"], "bias": None}, first).worst == pytest.approx(1.0)
    assert distance({"weight": first["weight"]}, first).worst == pytest.approx(1.0)
    assert distance({"bias": None}, {"bias": None}).worst == 0.0


def test_a_tensor_of_another_size_is_infinitely_far() -> None:
    apart = distance({**gradients(), "bias": torch.ones(3)}, gradients())
    assert (apart.tensor, apart.worst, apart.whole) == ("bias", math.inf, math.inf)


def test_what_is_not_finite_is_infinitely_far() -> None:
    mine = gradients()
    mine["weight"][0, 0] = math.nan
    assert distance(mine, gradients()).worst == math.inf


def test_a_factor_is_fitted() -> None:
    reference = gradients()
    found = fit(flat({name: one * 0.5 for name, one in reference.items()}, reference), [flat(reference, reference)])
    assert found.factors == (pytest.approx(0.5),)
    assert found.left < 1e-12


def test_weights_of_several_parts_are_fitted() -> None:
    parts = [flat(gradients(seed), gradients()) for seed in (1, 2, 3)]
    target = 0.25 * parts[0] + 0.5 * parts[1] + 0.25 * parts[2]
    found = fit(target, parts)
    assert found.factors == pytest.approx((0.25, 0.5, 0.25))
    assert found.left < 1e-12


def test_reduced_precision_says_that_it_cannot_tell() -> None:
    coarse = {name: one.bfloat16() for name, one in gradients().items()}
    assert is_too_coarse(0.0, coarse)
    assert not is_too_coarse(1e-6, gradients())


def test_nothing_is_fitted_to_what_is_not_finite() -> None:
    """LAPACK refuses it as a bug of torch."""
    for target, part in ((1.0, math.nan), (math.nan, 1.0), (math.inf, 1.0)):
        found = fit(torch.tensor([1.0, target]).double(), [torch.tensor([1.0, part]).double()])
        assert found.left == math.inf


def test_what_is_imaginary_counts() -> None:
    apart = distance({"w": torch.tensor([3.0 + 4.0j])}, {"w": torch.tensor([3.0 + 0.0j])})
    assert apart.worst == pytest.approx(4 / 3)
    assert distance({"w": None}, {"w": torch.tensor([3.0 + 4.0j])}).worst == pytest.approx(1.0)
