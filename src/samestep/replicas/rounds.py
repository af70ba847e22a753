"""When a model has taken a step: told by the optimizers that hold its parameters, which may be several.

torch runs a hook after every step of every optimizer, and leaves open whose step it was. Some models have several
optimizers, some of which step more seldom than others; a step of the model begins when one of them comes round again:

    optimizers      A   B     A   B     A     A   B     C     C          C has taken the place of A and B
    step            1         2         3     4               5

To wait for the last of them would be to know how many there are; to count one of them would end with it. Any moment
between two optimizers does where replicas are compared, since they are alike at each.

An optimizer inside another has done half of the work when it is done (ZeroRedundancyOptimizer then sends the rest of
the weights), so only the outermost counts.
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

__all__: list[str] = []


def is_among(parameters: Container[int], optimizer: Optimizer) -> bool:
    """Whether an optimizer has one of these parameters, which are given by their `id`."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


class Watcher(Protocol):
    """Who wants to know."""

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has parameters of its model."""

    def note_step(self, optimizer: Optimizer, number: int) -> None:
        """An optimizer of its model has stepped; no other has its number."""


@dataclass
class Rounds:
    """Tells one step of a model from the next.

    By numbers, not by what is still alive: memory is freed at another time on every rank.

    Args:
        keeps: whether the optimizers are remembered.
    """

    keeps: bool
    _stepped: set[int] = field(default_factory=set)
    _now: list[Optimizer] = field(default_factory=list)
    _before: list[Optimizer] = field(default_factory=list)

    def begins_with(self, optimizer: Optimizer, number: int) -> bool:
        """Notes an optimizer's step; whether a step of the model begins with it."""
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


class _Nesting:
    """The outermost of the optimizers that are stepping.

    One whose step raised counts as stepping until it steps again or is gone: torch tells of no other end.
    """

    outermost: weakref.ref[Optimizer] | None = None

    def enter(self, optimizer: Optimizer) -> None:
        if self.outermost is None or self.outermost() is None:
            self.outermost = weakref.ref(optimizer)

    def leave(self, optimizer: Optimizer) -> bool:
        """Whether it was the outermost."""
        outermost = None if self.outermost is None else self.outermost()
        if outermost is not None and outermost is not optimizer:
            return False
        self.outermost = None
        return True


@dataclass
class _Known:
    """What is known of an optimizer: its number, and who watches a model that it has parameters of."""

    number: int
    key: list[int]
    watchers: list[weakref.ref[Watcher]]


_watchers: weakref.WeakKeyDictionary[Watcher, int] = weakref.WeakKeyDictionary()  # numbered as they came
_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_nesting = _Nesting()


def watch_steps(watcher: Watcher) -> None:
    """Lets a watcher know of every step from now on, as long as it lives."""
    _watchers[watcher] = next(_numbers)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    if _watchers and not torch.compiler.is_compiling():
        _nesting.enter(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    if not _watchers or torch.compiler.is_compiling() or not _nesting.leave(optimizer) or is_capturing():
        return
    known = _known_of(optimizer)
    for reference in known.watchers:
        if (watcher := reference()) is not None:
            watcher.note_step(optimizer, known.number)


def is_capturing() -> bool:
    """Whether a CUDA graph is being recorded, in which nothing can be read back."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _known_of(optimizer: Optimizer) -> _Known:
    """Worked out once, until its parameters or the watchers change."""
    key = [len(group["params"]) for group in optimizer.param_groups] + sorted(_watchers.values())
    known = _known.get(optimizer)
    if known is None or known.key != key:
        number = next(_numbers) if known is None else known.number
        mine = [watcher for watcher in _watchers if watcher.holds(optimizer)]
        mine.sort(key=_watchers.__getitem__)  # several of one optimizer: in the same order on every rank
        _known[optimizer] = known = _Known(number, key, [weakref.ref(watcher) for watcher in mine])
    return known
