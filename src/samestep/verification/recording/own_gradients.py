"""Keeps what a rank's backward passes bring by themselves, before anything averages it.

Hooks of the parameters see it, in the windows whose values are kept. What was brought before gradients were set back
(by one optimizer of another one's parameters, say) does not count. Parameters that are cut over the ranks have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class OwnGradients:
    """Sums them up, while they are `wanted`."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._sums: Any = WeakIdKeyDictionary()  # parameter -> what was brought since its gradient was set back
        self._watched: Any = WeakIdKeyDictionary()

    def watch(self, parameters: Iterable[Any]) -> None:
        for one in parameters:
            if isinstance(one, Tensor) and one not in self._watched and _is_whole(one):
                self._watched[one] = one.register_hook(_Hook(self, one))  # type: ignore[no-untyped-call]

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """A backward pass has brought a parameter's gradient, which is not added to others yet."""
        if not self._wanted():
            return
        begins = parameter.grad is None or (not parameter.grad.is_sparse and not parameter.grad.any())
        known = None if begins else self._sums.get(parameter)
        self._sums[parameter] = gradient.detach().clone() if known is None else known + gradient.detach()

    def of(self, parameters: Mapping[str, Any], scale: float) -> dict[str, Tensor | None] | None:
        """Returns those of some parameters, without a scaler's factor; None where some are cut, or none was brought."""
        if not all(isinstance(one, Tensor) and one in self._watched for one in parameters.values()):
            return None
        found = {name: self._sums.get(one) for name, one in parameters.items()}
        if all(one is None for one in found.values()):
            return None
        return {name: None if one is None else one / scale for name, one in found.items()}

    def forget(self) -> None:
        self._sums.clear()


class _Hook:
    """A tensor's hook that does not keep it alive."""

    def __init__(self, owner: OwnGradients, parameter: Tensor) -> None:
        self._owner = owner
        self._parameter = weakref.ref(parameter)

    def __call__(self, gradient: Tensor) -> None:
        parameter = self._parameter()
        if parameter is not None:
            self._owner.add(parameter, gradient)


def _is_whole(parameter: Tensor) -> bool:
    is_flat = getattr(parameter, "_fsdp_flattened", False) or hasattr(parameter, "_local_tensor")
    return parameter.requires_grad and parameter.is_leaf and not is_flat
