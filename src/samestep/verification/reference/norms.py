"""BatchNorm as the ranks have it: every rank's part of a batch by its own statistics.

One process has the statistics of the whole batch, so its gradients differ from those of ranks with plain BatchNorm.
That is a difference which the script declares by using it; compared is what it declares.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from samestep.instrument.patch import patch


def slice_norms(module: ModuleType, sizes: Callable[[], list[int]]) -> None:
    """Changes torch's BatchNorm, and no class derived from it; `sizes` returns each rank's samples in the batch."""

    @patch(module._BatchNorm, "forward", compiled=True)  # noqa: SLF001
    def forward(original: Any, self: Any, value: Any) -> Any:
        parts = sizes()
        total = sum(parts)
        own = type(self).__module__.startswith("torch.nn.modules.batchnorm")
        if not (self.training and own and len(parts) > 1 and total and value.shape[0] % total == 0):
            return original(self, value)
        import torch

        each = value.shape[0] // total
        slices = value.split([size * each for size in parts])
        first = original(self, slices[0])  # rank 0's statistics are those that DistributedDataParallel keeps
        return torch.cat([first, *(_without_statistics(self, one) for one in slices[1:])])


def _without_statistics(norm: Any, value: Any) -> Any:
    import torch

    return torch.nn.functional.batch_norm(value, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
