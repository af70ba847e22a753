"""What a rank tells the others when its step ends: its share of the loss, and its wishes.

A script that prints its loss usually prints that of rank 0's last micro-batch, or stops all ranks to reduce it. Here
every rank adds up its share while the step computes and hands it over when the step ends; nobody waits until asked.

    on the CPU       one message [loss, wishes] over the control group
    on the GPU       the loss over the device's own group, so that no rank waits for its GPU; wishes as above
"""

from __future__ import annotations

import math

import torch

from samestep.runtime.sums import PendingSum, start_sum
from samestep.runtime.world import World

__all__: list[str] = []


class StepReport:
    """The reports of one rank, one for each step, in the same order on all ranks."""

    def __init__(self, world: World) -> None:
        self._axis = world.data
        self._state = world.step
        self._on_host = world.device.type == "cpu"
        self._nothing = torch.zeros(1, dtype=torch.float64, device=world.device)
        self._share: torch.Tensor | None = None
        self._loss: PendingSum | None = None
        self._wishes: PendingSum | None = None

    def add(self, value: torch.Tensor) -> None:
        """Adds one micro-batch's share of the loss, a scalar."""
        # a copy, whatever the dtype: it is summed in place, and the caller's value must not change
        part = value.detach().to(torch.float64, copy=True)
        self._share = part if self._share is None else self._share + part

    def discard(self) -> None:
        """Forgets a step that was abandoned."""
        self._share = None

    def send(self) -> None:
        """Ends a step: settles what the report before this one said, and sends this one. Collective.

        Every rank sends at the end of every step, so that one which never called `mean` holds nobody up.
        """
        if self._wishes is not None:
            self._state.settle(float(self._wishes.wait()[-1]))
        share, self._share = self._share, None
        loss = self._nothing.clone() if share is None else share.reshape(1)
        wishes = self._take_wishes()
        if self._on_host:
            both = loss if wishes is None else torch.cat((loss, wishes))
            sent = start_sum(both, self._axis.control)
            self._loss, self._wishes = sent, None if wishes is None else sent
        else:
            self._loss = start_sum(loss, self._axis.group)
            self._wishes = None if wishes is None else start_sum(wishes, self._axis.control)
        if share is None:
            self._loss = None

    def _take_wishes(self) -> torch.Tensor | None:
        if not self._state.listens:
            return None
        return torch.tensor([self._state.take_wishes()], dtype=torch.float64)

    def read(self) -> float:
        """Returns the last finished step's loss over all ranks; waits if it is still on its way."""
        return math.nan if self._loss is None else float(self._loss.wait()[0])
