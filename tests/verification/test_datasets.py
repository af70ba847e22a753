"""Samples of a dataset that ranks may compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from samestep.verification.recording.datasets import fingerprint, mixes


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


@dataclass
class Collator:
    """One without a hash, as collators that are data classes have none."""

    roll: int

    def __call__(self, samples: list[torch.Tensor]) -> list[torch.Tensor]:
        stacked = torch.stack(samples)
        return [stacked, stacked.roll(self.roll, 0)]


@pytest.mark.parametrize(("roll", "are_mixed"), [(0, False), (1, True)])
def test_a_look_at_a_collate_function_draws_no_number_of_the_script_s(roll: int, *, are_mixed: bool) -> None:
    for dataset in (Noisy(3), Noisy(None)):
        before = torch.get_rng_state()
        assert mixes(dataset, Collator(roll)) is are_mixed
        assert torch.equal(torch.get_rng_state(), before)
    held = Noisy(3)
    mixes(held, Collator(roll))
    assert torch.equal(held[0], Noisy(3)[0])
