"""The checkpoint benchmark times what it says: windows that differ by one save, and the same state by hand."""

from __future__ import annotations

import torch
from small import small

from samestep.bench import checkpoint


def test_every_rank_returns_a_time_for_each_pair_and_really_saves(two_ranks, tmp_path):
    for told in two_ranks(small, checkpoint.compare, (2, str(tmp_path), 3)):
        assert {name: len(told[name]) for name in ("with", "without", "still", "by_hand")} == dict.fromkeys(
            ("with", "without", "still", "by_hand"), 2
        )
        assert min(*told["with"], *told["without"], *told["still"]) > 0
        assert told["setting"]["megabytes"] == 0.7
    ours = max((tmp_path / "ours").glob("step-*/tensors.safetensors"))
    by_hand = torch.load(tmp_path / "by-hand.pt", weights_only=True)
    assert sum(state["exp_avg"].numel() for state in by_hand["optimizer"]["state"].values()) * 12 < ours.stat().st_size
