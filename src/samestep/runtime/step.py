"""What all ranks agree on, step by step: is this the micro-batch that ends the step, save now, stop now.

Clocks and signals differ between ranks. A rank that saved, or stopped, because *its* clock said so would leave the
others waiting in a collective. So a rank only wishes; the wishes ride on one small reduction per step, issued in
the same order everywhere, and all ranks act on its result at the end of the same step:

    rank 0   wish "save" ──┐            step k            finish_step: agreed = {"save"}  → all save after step k
    rank 1        ─        ├─ all-reduce [weight of step k+1, save, stop] ── beside the computation
    rank 2        ─        ┘
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from samestep.runtime.axes import Axis

__all__: list[str] = []

WISHES = ("save", "stop")


@dataclass
class StepState:
    """The state of the step that this rank is in.

    Attributes:
        step_ends: the micro-batch yielded last is the last of its step; known before its forward. True without
            shards, so that every backward synchronises.
        wishes: what this rank would like ("save", "stop"); put into the next step's reduction.
        agreed: what all ranks do at the end of the last finished step; equal on every rank.
    """

    step_ends: bool = True
    wishes: set[str] = field(default_factory=set)
    agreed: frozenset[str] = frozenset()

    def propose(self, axis: Axis, weight: float) -> Agreement:
        """Issues this step's reduction: this rank's weight of the coming step, and its wishes. Collective."""
        votes = torch.tensor([weight, *(float(wish in self.wishes) for wish in WISHES)], dtype=torch.float64)
        work = None
        if axis.control is not None:
            work = dist.all_reduce(votes, group=axis.control, async_op=True)
        return Agreement(self, votes, work)


@dataclass
class Agreement:
    """A reduction under way; `settle` waits for it."""

    state: StepState
    votes: torch.Tensor  # [weight, save, stop], float64, host
    work: dist.Work | None

    def settle(self) -> float:
        """Waits, publishes what was agreed, and returns the weight summed over the ranks."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        weight, *counts = self.votes.tolist()
        self.state.agreed = frozenset(wish for wish, count in zip(WISHES, counts, strict=True) if count > 0)
        return float(weight)
