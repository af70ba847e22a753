"""Random numbers of a pipeline's layers, dropout's above all: seeded by step, micro-batch and layer, on any rank.

    seed = (seed, replica) · step · micro-batch · layer        so a layer draws the same, however the model is cut,
                                                               whatever the schedule, and in one process too

In torch's own pipelines a stage draws from the stream of its process: with other cuts, or micro-batches in another
order, it is another training. Torch's generators are seeded, on the host and on the layer's device; Python's and
NumPy's are not. After a step the streams are where they were before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from samestep.seeding import GOLDEN, derive_seed

_BITS = (1 << 63) - 1


class LayerRng:
    """The random numbers of one rank's layers.

    Attributes:
        steps: how many micro-batches of a loader, or steps without one, have been taken.
    """

    def __init__(self, seed: int, replica: int, devices: Sequence[torch.device]) -> None:
        self.steps = 0
        self._seed = seed
        self._replica = replica
        self._gpus = [each for each in dict.fromkeys(devices) if each.type == "cuda"]
        self._seeds: dict[int, int] | None = None  # by micro-batch; None outside of a step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Makes :meth:`seed_layer` seed; afterwards the streams are where they were. A failed step counts, too."""
        self._seeds = {}
        try:
            with torch.random.fork_rng(self._gpus):
                yield
        finally:
            self._seeds = None
            self.steps += 1

    def seed_layer(self, micro_batch: int, layer: int, device: torch.device) -> None:
        """Seeds torch's generators before a layer computes a micro-batch on a device."""
        if self._seeds is None:
            return
        if micro_batch not in self._seeds:
            self._seeds[micro_batch] = derive_seed(self._seed, self._replica, self.steps, micro_batch)
        seed = (self._seeds[micro_batch] + layer * GOLDEN) & _BITS
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)

    def state(self) -> list[int]:
        """Returns what a resumed run continues from; the same on every rank."""
        return [self._seed, self.steps]

    def load(self, state: list[int]) -> None:
        self._seed, self.steps = state
