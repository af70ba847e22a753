"""Notes where a rank's time goes, as far as a script that knows nothing of samestep shows it.

    a DataLoader's next batch      phase "data", as within samestep.shards
    model.eval()                   phase "evaluate", until the next step
    a backward pass                from the last gradient of a DistributedDataParallel on, it waits for other ranks

Which gradient is the last is learnt in the first passes: a hook for every parameter, in every step, would take 0.3 ms
of a model with 150 of them.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from samestep import progress
from samestep.launch.imports import when_imported

__all__: list[str] = []

LEARNT = 2  # backward passes in which all gradients are looked at


def begin() -> None:
    """Notes from now on."""
    when_imported("torch.utils.data.dataloader", _note_loading)
    when_imported("torch.nn.modules.module", _note_evaluations)
    when_imported("torch.autograd", _note_backward)


def _note_loading(module: Any) -> None:
    iterator = module._BaseDataLoaderIter  # noqa: SLF001
    original = iterator.__next__

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807
        before = progress.note_phase("data")
        try:
            return original(self)
        finally:
            progress.note_phase(before)

    iterator.__next__ = __next__


def _note_evaluations(module: Any) -> None:
    """A script that tells its model to evaluate may take its time, until it steps again."""
    original = module.Module.eval

    @functools.wraps(original)
    def evaluating(self: Any) -> Any:
        progress.note_phase("evaluate")
        return original(self)

    module.Module.eval = evaluating


_learning: list[_Lasts] = []


def _note_backward(module: ModuleType) -> None:
    original: Any = vars(module)["backward"]

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        progress.note_backward()
        _learning[:] = [each for each in _learning if each.goes_on()]
        return result

    module.backward = backward  # type: ignore[attr-defined]  # Tensor.backward calls it by this name


def watch_gradients(wrapped: Any) -> None:
    """Learns which gradient of a DistributedDataParallel is the last, and notes when it is there."""
    if progress.is_attached():
        _learning.append(_Lasts([each for each in wrapped.module.parameters() if each.requires_grad and each.is_leaf]))


class _Lasts:
    """The gradients of one model, until it is known which comes last."""

    def __init__(self, parameters: list[Any]) -> None:
        self._passes = 0
        self._last = -1
        self._handles = [
            each.register_post_accumulate_grad_hook(functools.partial(self._there, number))
            for number, each in enumerate(parameters)
        ]

    def _there(self, number: int, _: Any) -> None:
        self._last = number
        progress.note_ready()

    def goes_on(self) -> bool:
        """Returns, after a backward pass, whether all gradients are looked at in the next too."""
        self._passes += self._last >= 0  # else it was another model's
        if self._passes < LEARNT:
            return True
        for handle in (*self._handles[: self._last], *self._handles[self._last + 1 :]):
            handle.remove()
        return False
