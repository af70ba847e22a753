"""Draws that are handed out again have the form of those that the script makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samestep.verification.recording.chance import Draws, joined_draws


@pytest.mark.parametrize("own", [np.int64(2), np.float64(0.5), 3, 0.25, np.array([1, 2]), [4, 5], torch.ones(2)])
def test_what_all_ranks_have_drawn_is_one_draw(own: Any) -> None:
    part = torch.as_tensor(own)
    whole = joined_draws("numpy.random.choice", own, [part, part.clone()])
    assert type(whole) is type(own)
    assert np.array_equal(whole, own)


def test_permutations_are_of_each_rank_s_own_samples() -> None:
    """Partners of a mixup, by position in a batch."""
    parts = [torch.tensor([1, 0]), torch.tensor([0, 2, 1])]
    whole = joined_draws("numpy.random.permutation", np.arange(5), parts)
    assert whole is not None
    assert whole.tolist() == [1, 0, 2, 4, 3]


def test_draws_of_ranks_that_take_turns_are_joined_in_turns() -> None:
    """As data[rank::world_size] cuts them, of which one rank has one more."""
    parts = [torch.tensor([0.0, 2.0, 4.0]), torch.tensor([1.0, 3.0])]
    whole = joined_draws("torch.randn", torch.zeros(5), parts, strided=True)
    assert whole is not None
    assert whole.tolist() == [0, 1, 2, 3, 4]


def test_draws_without_gradients_are_counted_by_themselves() -> None:
    draws = Draws()
    draws.place(0, "train.py:4")
    with torch.no_grad():
        draws.place(0, "train.py:9")
        assert draws.count == 1
    draws.place(0, "train.py:4")
    assert draws.count == 2
