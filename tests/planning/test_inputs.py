"""Calls of a model that are made again on fewer samples."""

from __future__ import annotations

from collections import OrderedDict, UserDict

import pytest
import torch

from samestep.errors import ModelError
from samestep.planning.model_profile import CapturedCall


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_samples_in_a_dict_are_cut_and_its_kind_is_kept(kind: type) -> None:
    call = CapturedCall.of((kind(ids=torch.arange(24).view(8, 3), scale=2),), {})
    given = call.first(2).args[0]
    assert type(given) is kind
    assert given["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert given["scale"] == 2


def test_samples_that_cannot_be_cut_are_no_smaller_batch() -> None:
    call = CapturedCall.of((UserDict(ids=torch.zeros(8, 3)),), {})
    assert call.first(8).samples == 8
    with pytest.raises(ModelError, match="cannot be cut into fewer samples"):
        call.first(4)
