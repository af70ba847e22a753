"""The step that is being computed, and what a loss must be to add up to the whole step's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from samestep.data.ledger import Skip
from samestep.data.order import StepPartition
from samestep.errors import StepError

__all__: list[str] = []


@dataclass
class OpenStep:
    """The step that is being computed on this rank.

    Attributes:
        step: its cut.
        weight: of the whole step, over all ranks.
        counts: samples in each of this rank's micro-batches, those that were skipped not counted.
        weights: of these micro-batches, where `weight` was given to `shards`; else None.
        skipped: of the whole step, over all ranks.
        micro: the micro-batch yielded last.
    """

    step: StepPartition
    weight: float
    counts: list[int]
    weights: list[float] | None = None
    skipped: tuple[Skip, ...] = ()
    micro: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no sample in the micro-batch."""
        return self.counts[self.micro] == 0

    @property
    def place(self) -> int:
        """Which of the slices held here the micro-batch yielded last belongs to; 0 without virtual ranks."""
        return self.step.slice_of(self.micro)

    @property
    def step_ends(self) -> bool:
        """Whether the micro-batch yielded last is the step's last."""
        return self.micro == len(self.step.micro) - 1

    def share(self, losses: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the sum of the losses that count, over the weight of the step.

        Raises:
            StepError: the losses are reduced already, or do not match the batch or its weight.
        """
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
