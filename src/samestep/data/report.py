"""What a rank tells the others when its step ends: its share of the loss, and its requests.

A script that prints its loss usually prints that of rank 0's last micro-batch, or stops all ranks to reduce it. Here
every rank adds up its share while the step computes and hands it over when the step ends; nobody waits until asked.

    on the CPU       one message (loss, requests)
    on the GPU       the loss over the device's own group, so that no rank waits for its GPU; requests by themselves
"""

from __future__ import annotations

import math

import torch

from samestep.launch.warning import warn
from samestep.runtime.sums import PendingSum, Tag, start_device_sum, start_sum
from samestep.runtime.world import World
from samestep.topology import tree_sum

__all__: list[str] = []


_WITHOUT_MEAN = (
    "a step has ended whose loss did not come from batches.mean(...): the mean of each rank's own mean is not the mean "
    "of the whole step where their shares differ, and batches.loss is nan. Write loss = batches.mean(losses), with "
    'reduction="none"'
)


class StepReport:
    """The reports of one rank, one for each step, in the same order on all ranks."""

    def __init__(self, world: World) -> None:
        self._axis = world.data
        self._state = world.step
        self._device = world.device
        self._shares: dict[int, torch.Tensor | float] = {}  # by slice
        self._loss: PendingSum | None = None
        self._requests: PendingSum | None = None
        self._warned = False
        self._earlier = math.nan

    def add(self, value: torch.Tensor, place: int = 0) -> None:
        """Adds one micro-batch's share of the loss, a scalar, to that of the slice at `place` among those held here."""
        part = value.item() if self._device.type == "cpu" else value.detach().to(self._device, torch.float64)
        self._shares[place] = self._shares[place] + part if place in self._shares else part

    def discard(self) -> None:
        """Forgets a step that was abandoned."""
        self._shares.clear()

    def send(self, tag: Tag) -> None:
        """Ends a step: settles what the report before this one said, and sends this one. Collective.

        Every rank sends at the end of every step, so that one which never called `mean` holds nobody up.
        """
        if self._requests is not None:
            self._state.apply(self._requests.wait()[-1])
        share = tree_sum([self._shares[place] for place in sorted(self._shares)]) if self._shares else None
        self._shares.clear()
        if share is None and self._state.averaged and not self._warned:
            self._warned = True
            warn(_WITHOUT_MEAN)
        self._state.averaged = False
        self._earlier = math.nan
        self._loss = self._requests = None
        requests = (self._state.take_requests(),) if self._state.requests_enabled else ()
        if self._device.type == "cpu":
            sent = start_sum(self._axis, float(share or 0.0), *requests, tag=tag)
            self._requests = sent if requests else None
        else:
            on_device = torch.zeros(1, dtype=torch.float64, device=self._device) + (0.0 if share is None else share)
            sent = start_device_sum(self._axis, on_device)
            self._requests = start_sum(self._axis, *requests, tag=tag) if requests else None
        self._loss = None if share is None else sent

    def read(self) -> float:
        """Returns the last finished step's loss over all ranks; waits if it is still on its way."""
        return self._earlier if self._loss is None else self._loss.wait()[0]

    def resume(self, loss: float | None) -> None:
        """Goes on behind a step of an earlier run, which had this loss."""
        self._loss, self._earlier = None, math.nan if loss is None else float(loss)
