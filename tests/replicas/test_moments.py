"""Merging statistics of parts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.replicas.batchnorm import local_moments, merge_moments


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.floats(-1e6, 1e6), st.integers(0, 2**31))
def test_parts_merged_are_the_moments_of_the_whole(sizes, offset, seed):
    x = torch.randn(sum(sizes), 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + offset
    merged = merge_moments([local_moments(part) for part in x.split(sizes)])
    whole = local_moments(x)
    assert merged.count == whole.count == 3 * sum(sizes)
    # The mean is rounded relative to the offset; squares of distances from it feel that rounding squared at most.
    scale = max(1.0, abs(offset))
    assert torch.allclose(merged.mean, whole.mean, rtol=0, atol=1e-14 * scale)
    assert torch.allclose(merged.m2, whole.m2, rtol=1e-9, atol=1e-9)


def test_an_empty_batch_counts_nothing():
    nothing = local_moments(torch.randn(0, 4, 2, 2))
    assert (nothing.count, nothing.mean.tolist(), nothing.m2.tolist()) == (0, [0.0] * 4, [0.0] * 4)


def test_a_count_above_what_float32_can_hold_stays_exact():
    one = local_moments(torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**24 + 1, 1))
    assert one.count == 2**24 + 1
