"""BatchNorm as the ranks have it: every rank's part of a batch by its own statistics.

One process has the statistics of the whole batch, so its gradients differ from those of ranks with plain BatchNorm.
That is a difference which the script declares by using it; compared is what it declares. What the ranks have
synchronised stays whole, also where the script converts its model on several ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from samestep.instrument.patch import patch

_WHOLE = "samestep_is_synchronised"


def slice_norms(
    module: ModuleType, rows: Callable[[], list[Sequence[int]]], on_other: Callable[[], None] = lambda: None
) -> None:
    """Changes torch's BatchNorm, and no class derived from it; `rows` returns the places of each rank's samples.

    `on_other` is called where it normalises what is not known to be one value for each sample, in their order.
    """

    @patch(module._BatchNorm, "forward", compiled=True)  # noqa: SLF001
    def forward(original: Any, self: Any, value: Any) -> Any:
        parts = rows()
        total = sum(map(len, parts))
        own = type(self).__module__.startswith("torch.nn.modules.batchnorm") and not hasattr(self, _WHOLE)
        is_cut = self.training and own and len(parts) > 1 and total and value.shape[0] % total == 0
        if self.training and not hasattr(self, _WHOLE) and not (is_cut and value.shape[0] == total):
            on_other()
        if not is_cut:
            return original(self, value)
        import torch

        each = value.shape[0] // total
        places = [
            torch.tensor([row * each + i for row in one for i in range(each)], device=value.device) for one in parts
        ]
        first = original(self, value[places[0]])  # rank 0's statistics are those that DistributedDataParallel keeps
        others = (_without_statistics(self, value[one]) for one in places[1:])
        return torch.cat([first, *others])[torch.cat(places).argsort()]


def _without_statistics(norm: Any, value: Any) -> Any:
    import torch

    return torch.nn.functional.batch_norm(value, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)


def keep_whole(norms: Iterable[Any], are_local: Sequence[bool]) -> None:
    """Leaves those whole that the ranks have synchronised: all, or those for which `are_local` is False."""
    norms = list(norms)
    if not any(are_local):
        are_local = [False] * len(norms)
    if len(norms) == len(are_local):
        for norm, is_local in zip(norms, are_local, strict=True):
            if not is_local:
                setattr(norm, _WHOLE, True)
