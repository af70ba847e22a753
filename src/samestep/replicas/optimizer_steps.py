"""Hooks after the optimizer steps of a model.

torch runs a hook after every step of every optimizer, and does not say whose step it was. Some models have several
optimizers, some of which step more seldom than others; a step of the model begins when one of them comes round again.
Any moment between two optimizers does where replicas are compared, since they are equal at each. An optimizer inside
another has done half of the work when it is done (ZeroRedundancyOptimizer then sends the rest of the weights), so only
the outermost counts.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def is_among(parameters: Container[int], optimizer: Optimizer) -> bool:
    """Whether an optimizer has one of these parameters, which are given by their `id`."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


class StepListener(Protocol):
    """Is told of the steps of a model's optimizers."""

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has parameters of its model."""

    def note_step(self, optimizer: Optimizer, number: int) -> None:
        """An optimizer of its model has stepped; no other has its number."""


@dataclass
class ModelStepCounter:
    """Tells one step of a model from the next, by the numbers of its optimizers.

    By numbers, not by what is still alive: memory is freed at another time on every rank. With `keeps` the optimizers
    are remembered.
    """

    keeps: bool
    _stepped: set[int] = field(default_factory=set)
    _now: list[Optimizer] = field(default_factory=list)
    _before: list[Optimizer] = field(default_factory=list)

    def begins_with(self, optimizer: Optimizer, number: int) -> bool:
        """Notes an optimizer's step; returns whether a step of the model begins with it."""
        begins = not self._stepped or number in self._stepped
        if begins:
            self._stepped = set()
            self._before, self._now = self._now, []
        self._stepped.add(number)
        if self.keeps:
            self._now.append(optimizer)
        return begins

    def optimizers(self) -> list[Optimizer]:
        """Returns those of this and the last step, in the order in which they stepped."""
        return list(dict.fromkeys([*self._before, *self._now]))


@dataclass
class _Known:
    number: int
    key: list[int]
    listeners: list[weakref.ref[StepListener]]


_listeners: weakref.WeakKeyDictionary[StepListener, int] = weakref.WeakKeyDictionary()  # numbered as they came
_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
# The outermost optimizer that is stepping. One whose step raised counts as stepping until it steps again or is gone:
# torch reports no other end.
_outermost: weakref.ref[Optimizer] | None = None


def add_step_listener(listener: StepListener) -> None:
    """Calls `listener.note_step` after every step of its model's optimizers, as long as it lives."""
    _listeners[listener] = next(_numbers)
    _hook_steps()


@functools.cache
def _hook_steps() -> None:
    register_optimizer_step_pre_hook(_enter_step)
    register_optimizer_step_post_hook(_after_step)


def _enter_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    global _outermost  # noqa: PLW0603
    if _listeners and not torch.compiler.is_compiling() and (_outermost is None or _outermost() is None):
        _outermost = weakref.ref(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    global _outermost  # noqa: PLW0603
    if not _listeners or torch.compiler.is_compiling():
        return
    outermost = None if _outermost is None else _outermost()
    if outermost is not None and outermost is not optimizer:
        return
    _outermost = None
    if is_capturing():
        return
    known = _known_of(optimizer)
    for reference in known.listeners:
        if (listener := reference()) is not None:
            listener.note_step(optimizer, known.number)


def is_capturing() -> bool:
    """Whether a CUDA graph is being recorded, in which nothing can be read back."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _known_of(optimizer: Optimizer) -> _Known:
    """Computed once, until its parameters or the listeners change."""
    key = [len(group["params"]) for group in optimizer.param_groups] + sorted(_listeners.values())
    known = _known.get(optimizer)
    if known is None or known.key != key:
        number = next(_numbers) if known is None else known.number
        mine = [listener for listener in _listeners if listener.holds(optimizer)]
        mine.sort(key=_listeners.__getitem__)  # several of one optimizer: in the same order on every rank
        _known[optimizer] = known = _Known(number, key, [weakref.ref(listener) for listener in mine])
    return known
