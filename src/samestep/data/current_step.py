"""The step that is being computed: shares of its loss, and the report that ends it.

A script that prints its loss usually prints that of rank 0's last micro-batch, or stops all ranks to reduce it. Here
every rank adds up its share while the step computes and sends it when the step ends; no rank waits until it is read.
On the CPU one message carries loss and requests; on a GPU the loss goes over the device's own group, so that no rank
waits for its GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from samestep.data.ledger import Skip
from samestep.data.order import StepPartition
from samestep.errors import StepError
from samestep.launch.rank.user_code import warn
from samestep.runtime.scalar_sums import PendingSum, StepTag
from samestep.runtime.world import World
from samestep.topology import tree_sum

_WITHOUT_MEAN = (
    "a step has ended whose loss did not come from batches.mean(...): the mean of each rank's own mean is not the mean "
    "of the whole step where their shares differ, and batches.loss is nan. Write loss = batches.mean(losses), with "
    'reduction="none"'
)


@dataclass
class CurrentStep:
    step: StepPartition  # its partition
    weight: float  # of the whole step, over all ranks
    counts: list[int]  # samples in each of this rank's micro-batches, those that were skipped not counted
    weights: list[float] | None = None  # of these micro-batches, where `weight` was given to `shards`; else None
    skipped: tuple[Skip, ...] = ()  # of the whole step, over all ranks
    micro: int = 0  # the micro-batch yielded last

    @property
    def is_empty(self) -> bool:
        return self.counts[self.micro] == 0

    @property
    def local_slice(self) -> int:
        """Which of this rank's slices the micro-batch belongs to; 0 without virtual ranks."""
        return self.step.slice_of(self.micro)

    @property
    def step_ends(self) -> bool:
        return self.micro == len(self.step.micro) - 1

    def loss_share(self, losses: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        self._check(losses, mask)
        # a loss that does not count may be inf or nan, and 0 times that is nan
        counted = losses if mask is None else torch.where(mask.bool(), losses * mask, torch.zeros_like(losses))
        half = losses.dtype in {torch.float16, torch.bfloat16}
        value = counted.sum(dtype=torch.float32 if half else None) / (self.weight or 1.0)  # of nothing: 0, not nan
        # a batch of a type that could not be cut to nothing holds a sample all the same
        return value * 0.0 if self.is_empty else value

    def _check(self, losses: torch.Tensor, mask: torch.Tensor | None) -> None:
        if losses.dim() == 0:
            raise StepError(
                'the loss is reduced already, and a mean of means is not the mean: pass reduction="none", one loss '
                "per item"
            )
        if mask is not None and mask.shape != losses.shape:
            raise StepError(f"the mask has shape {list(mask.shape)}, the losses {list(losses.shape)}; they must match")
        if self.weights is not None:
            self._check_mask(mask, self.weights[self.micro])
            return
        count = self.counts[self.micro]
        if mask is not None or (losses.numel() != count and count > 0):
            raise StepError(
                f"losses of shape {list(losses.shape)} for {count} samples: without weight= an item is a "
                "sample. Give shards weight=lambda batch: … (the items that count, such as unmasked tokens), or "
                "reduce to one loss per sample"
            )

    def _check_mask(self, mask: torch.Tensor | None, weight: float) -> None:
        """On the host; on a GPU the check would stop the computation."""
        if mask is None or mask.device.type != "cpu" or self.is_empty:
            return
        counts = float(mask.sum())
        if not math.isclose(counts, weight, rel_tol=1e-6):
            raise StepError(
                f"the mask lets {counts:g} losses count, but weight() said {weight:g} for this micro-batch: the sum "
                "would be divided by the wrong number"
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
        self._saved = math.nan  # the loss of the last step before the checkpoint

    def add(self, value: torch.Tensor, local_slice: int = 0) -> None:
        """Adds one micro-batch's share of the loss, a scalar, to that of one of this rank's slices."""
        on_cpu = self._device.type == "cpu"
        part = value.item() if on_cpu else value.detach().to(self._device, torch.float64, copy=True)
        self._shares[local_slice] = self._shares[local_slice] + part if local_slice in self._shares else part

    def discard(self) -> None:
        self._shares.clear()

    def send(self, tag: StepTag) -> None:
        """Ends a step: applies the requests that came with the report before this one, and sends this one. Collective.

        Every rank sends at the end of every step, so that one which never called `mean` keeps no other waiting.
        """
        if self._requests is not None:
            self._state.apply(self._requests.wait()[-1])
        share = tree_sum([self._shares[place] for place in sorted(self._shares)]) if self._shares else None
        self._shares.clear()
        if share is None and self._state.averaged and not self._warned:
            self._warned = True
            warn(_WITHOUT_MEAN)
        self._state.averaged = False
        self._saved = math.nan
        self._loss = self._requests = None
        requests = (self._state.encode_requests(),) if self._state.requests_enabled else ()
        if self._device.type == "cpu":
            sent = self._axis.start_sum(float(share or 0.0), *requests, tag=tag)
            self._requests = sent if requests else None
        else:
            if isinstance(share, torch.Tensor):
                on_device = share.reshape(1)
            else:
                on_device = torch.zeros(1, dtype=torch.float64, device=self._device)
            sent = self._axis.start_device_sum(on_device)
            self._requests = self._axis.start_sum(*requests, tag=tag) if requests else None
        self._loss = None if share is None else sent

    def read(self) -> float:
        """Returns the last finished step's loss over all ranks; waits if it is still on its way."""
        return self._saved if self._loss is None else self._loss.wait()[0]

    def resume(self, loss: float | None) -> None:
        """Goes on behind a step of an earlier run, which had this loss."""
        self._loss, self._saved = None, math.nan if loss is None else float(loss)
