"""Samples of a dataset that ranks may compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samestep.verification.recording.fingerprints import fingerprint


class Noisy:
    """Images with noise, from torch's generator or from one of its own."""

    def __init__(self, own: int | None) -> None:
        self.own = None if own is None else np.random.default_rng(own)

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return index + (torch.randn(2) if self.own is None else torch.from_numpy(self.own.standard_normal(2)))


@pytest.mark.parametrize(("own", "shown"), [(None, 5), (3, 0)])
def test_a_dataset_that_draws_from_a_generator_of_its_own_shows_nothing(own: int | None, shown: int) -> None:
    """Each rank seeds it otherwise, and no sample is the one that another rank has."""
    told = fingerprint(Noisy(own))
    assert len(told) == shown
    assert told == fingerprint(Noisy(own))
