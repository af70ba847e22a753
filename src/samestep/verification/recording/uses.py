"""Finds evaluations of models that are no modules: functions of the script that compute with parameters it trains.

A product with a parameter, without gradients, is a forward; an average of parameters is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from samestep.instrument.patch import is_own, is_traced
from samestep.verification.recording.containers import tensors_of
from samestep.verification.recording.modes import LooseMode, is_plain

# What takes data into a model: products, convolutions, and rows of a table.
_FORWARDS = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "einsum", "tensordot"),
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "embedding", "embedding_bag", "__getitem__", "index_select"),
}


class ParameterUses(LooseMode):
    """Tells of each such call, from its creation to the end of the script.

    Args:
        parameters: returns the parameters that are trained.
        used: called before such a call, with the tensors that go into the model.
        stepping: returns where the script's own code writes a step that may not be over: its code and line.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[Tensor]],
        used: Callable[[tuple[Tensor, ...]], None],
        stepping: Callable[[], tuple[Any, int] | None],
    ) -> None:
        super().__init__()
        self._parameters = parameters
        self._used = used
        self._stepping = stepping
        self._is_busy = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_looked_at = not (torch.is_grad_enabled() or self._is_busy) and not is_traced()
        if is_looked_at and getattr(func, "__name__", "") in _FORWARDS:
            self._is_busy = True
            try:
                self._look([*args, *kwargs.values()])
            finally:
                self._is_busy = False
        return func(*args, **kwargs)

    def _look(self, given: list[Any]) -> None:
        known = {one.data_ptr() for one in self._parameters() if is_plain(one)}
        tensors = list(filter(is_plain, tensors_of(given)))
        data = tuple(one for one in tensors if one.data_ptr() not in known)
        if data and len(data) < len(tensors) and not self._is_of_step():
            self._used(data)

    def _is_of_step(self) -> bool:
        """Whether the script's own code still steps: a function, or a line, behind the one that writes has left it."""
        writes = self._stepping()
        if writes is None:
            return False
        frame: Any = sys._getframe(3)  # noqa: SLF001
        while frame is not None and not is_own(frame.f_code.co_filename):
            frame = frame.f_back
        return frame is None or (frame.f_code is writes[0] and frame.f_lineno <= writes[1])
