"""What every rank has of its take_own travels through one checkpoint and comes back to it, however its tensors lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import samestep
from samestep.checkpoints.state import ObjectState, gather_per_rank, take_own
from samestep.errors import CheckpointError
from samestep.testing import assert_same_bits


def there_and_back(value):
    with samestep.world(device="cpu") as world:
        state = ObjectState({"kind": "object"}, {"steps": 3, "loader": value})
        return take_own(gather_per_rank(SimpleNamespace(per_rank="loader"), state, world), world).content["loader"]


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).view(2, 3).T, torch.arange(8)[::2], torch.tensor([1 + 2j]).conj(), torch.tensor(4.0)],
    ids=["turned", "strided", "conjugate", "no dims"],
)
def test_a_loaders_tensors_come_back_however_they_lie(tensor):
    assert_same_bits(there_and_back({"queue": [tensor, 7]}), {"queue": [tensor, 7]})


def test_what_safetensors_lacks_is_refused_in_words():
    with pytest.raises(CheckpointError, match=r"complex128 tensor: keep it as view_as_real"):
        there_and_back([torch.zeros(1, dtype=torch.complex128)])
