"""Samples of a dataset that ranks may compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from samestep.verification.recording.datasets import fingerprint


class Noisy:
    """Images with noise, from torch's generator or from one of its own."""

    def __init__(self, own: int | None) -> None:
        self.own = None if own is None else np.random.default_rng(own)

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return index + (torch.randn(2) if self.own is None else torch.from_numpy(self.own.standard_normal(2)))


class Restless(Noisy):
    """Samples that count how often they were loaded."""

    loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return torch.tensor([index, self.loaded])


def test_noise_is_alike_wherever_a_dataset_draws_it_from() -> None:
    """Each rank seeds its own generator otherwise; it goes on as if nobody had looked."""
    own, other = Noisy(3), Noisy(4)
    assert len(fingerprint(own)) == 5
    assert fingerprint(own) == fingerprint(other) != fingerprint(Noisy(None))
    assert torch.equal(own[0], Noisy(3)[0])
    assert fingerprint(Restless(None)) == {}
