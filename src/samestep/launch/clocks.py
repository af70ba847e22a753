"""Notes where a rank's time goes, as far as a script that knows nothing of samestep shows it.

    a DataLoader's next batch      phase "data", as within samestep.shards; and how many numbers are in it
    model.eval()                   phase "evaluate", until model.train(), or the next backward pass or step
    a backward pass                phase "backward"; from the last gradient of a DistributedDataParallel on, it waits
                                   for other ranks
    the last gradient of a bucket  the bucket is filled

Which gradient is the last is learnt in the first passes: a hook for every parameter, in every step, would take 0.3 ms
of a model with 150 of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from samestep import progress
from samestep.launch.imports import when_imported

__all__: list[str] = []

LEARNT = 3  # backward passes in which all gradients are looked at; after the second DDP has its final buckets


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
        if progress.current_phase() == "evaluate":
            return original(self)  # its batches are part of it
        before = progress.set_phase("data")
        try:
            batch = original(self)
        finally:
            progress.set_phase(before)
        if before != "data":  # else it is one of samestep.shards, which know better
            progress.add_work({"elements": elements(batch)})
        return batch

    iterator.__next__ = __next__


def elements(batch: Any) -> int:
    """Returns the numbers in a batch's tensors: what sequences of unlike length make unequal.

    Args:
        batch: a tensor, or a list, tuple or mapping of them; in anything else nothing is counted.
    """
    if isinstance(batch, list | tuple):
        return sum(map(elements, batch))
    if isinstance(batch, Mapping):
        return sum(map(elements, batch.values()))
    counted: int = batch.numel() if hasattr(batch, "numel") else 0
    return counted


def _note_evaluations(module: Any) -> None:
    """A script that tells its model to evaluate may take its time, until it trains again."""
    eval_, train = module.Module.eval, module.Module.train

    @functools.wraps(eval_)
    def evaluating(self: Any) -> Any:
        progress.set_phase("evaluate")
        return eval_(self)

    @functools.wraps(train)
    def training(self: Any, mode: bool = True) -> Any:
        if mode:
            progress.end_phase("evaluate")
        return train(self, mode)

    module.Module.eval, module.Module.train = evaluating, training


_learning: list[_Lasts] = []


def _note_backward(module: ModuleType) -> None:
    original: Any = vars(module)["backward"]

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        before = progress.set_phase("backward")
        try:
            return original(*args, **kwargs)
        finally:
            progress.backward_done()
            progress.set_phase("train" if before == "evaluate" else before)
            _learning[:] = [each for each in _learning if each.goes_on()]

    module.backward = backward  # type: ignore[attr-defined]  # Tensor.backward calls it by this name


def watch_gradients(wrapped: Any) -> None:
    """Learns which gradients of a DistributedDataParallel come last, and notes when they are there."""
    if progress.is_attached():
        _learning.append(_Lasts(wrapped))


class _Lasts:
    """The gradients of one model, until it is known which comes last, of all and of each bucket."""

    def __init__(self, wrapped: Any) -> None:
        self._passes = 0
        self._last = self._final = -1  # gradient of a pass, and of every pass once it is known
        self._order: dict[int, int] = {}  # parameter -> how many came before it
        self._wrapped = weakref.ref(wrapped)
        parameters = [each for each in wrapped.module.parameters() if each.requires_grad and each.is_leaf]
        self._handles = [
            each.register_post_accumulate_grad_hook(functools.partial(self._there, number))
            for number, each in enumerate(parameters)
        ]
        self._buckets: dict[int, tuple[int, int]] = {}  # parameter that comes last in it -> number, bytes

    def _there(self, number: int, _: Any) -> None:
        self._last = number
        if self._passes < LEARNT:
            self._order.pop(number, None)
            self._order[number] = len(self._order)
            progress.gradients_ready()
            return
        if number in self._buckets:
            progress.bucket_filled(*self._buckets[number], begun=False)
        if number == self._final:
            progress.gradients_ready()

    def goes_on(self) -> bool:
        """Returns, after a backward pass, whether all gradients are looked at in the next too."""
        self._passes += self._last >= 0  # else it was another model's
        if self._passes < LEARNT:
            return True
        self._final = self._last
        self._buckets = self._filled()
        for number, handle in enumerate(self._handles):
            if number != self._final and number not in self._buckets:
                handle.remove()
        return False

    def _filled(self) -> dict[int, tuple[int, int]]:
        """Returns which gradient is the last of each bucket; none where the model tells of its buckets by itself."""
        wrapped = self._wrapped()
        told = {} if wrapped is None or wrapped._comm_hooks else wrapped._get_ddp_logging_data()  # noqa: SLF001
        members, sizes = told.get("rebuilt_per_bucket_param_indices", ""), told.get("rebuilt_bucket_sizes", "")
        found = {}
        for bucket, (inside, size) in enumerate(zip(members.split(", "), sizes.split(", "), strict=False)):
            numbers = [int(number) for number in inside.split() if int(number) in self._order]
            if numbers:
                found[max(numbers, key=lambda number: self._order[number])] = (bucket, int(size))
        return found
