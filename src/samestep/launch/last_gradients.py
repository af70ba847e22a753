"""Learns which gradients of a DistributedDataParallel come last, of all and of each bucket, and notes when they do.

A backward pass waits for other ranks from its last gradient on. Which one that is is learnt in the first passes: a hook
for every parameter, in every step, would take 0.3 ms of a model with 150 of them.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from samestep import progress

__all__: list[str] = []

LEARNT = 3  # backward passes in which all gradients are looked at; after the second DDP has its final buckets


class LastGradients:
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

    def continues(self) -> bool:
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
