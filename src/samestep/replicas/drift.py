"""The guard of the replicas: every few steps all ranks check that they still hold the same weights, bit for bit.

Every rank gets the same averaged gradients and takes the same step with them, so equal replicas stay equal. What makes
them diverge is outside: a tensor that one rank changes, an optimizer's state that was loaded on one rank only, a bit
that a faulty core or memory has flipped (Meta: 6 times in 54 days on 16,384 GPUs, "The Llama 3 Herd of Models", 2024).

One all-reduce of 16 bytes tells it: of a digest h the ranks reduce (h, ~h) by max; since ~x = -1 - x falls where x
rises, max(h) = ~max(~h) just where the largest h is the smallest [1]. Where it is not, the ranks exchange the digests
of every tensor (`state_digest`). When a model has taken a step, where it has several optimizers: `optimizer_steps`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from samestep.errors import DriftError, StepError, UsageError
from samestep.launch.rank.user_code import warn
from samestep.replicas.buffers import broadcast_tensors
from samestep.replicas.optimizer_steps import ModelStepCounter, add_step_listener, is_among
from samestep.replicas.state_digest import (
    Difference,
    StateItem,
    describe,
    differences,
    digest_of_all,
    first_of,
    items_of_model,
    items_of_optimizer,
    minority_ranks,
    ranks_named,
)
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json, broadcast_json
from samestep.runtime.world import World

__all__ = ["DriftGuard", "DriftMonitor"]

Policy = Literal["stop", "warn", "repair"]
POLICIES = ("stop", "warn", "repair")

MOST_PRINTED = 10  # warnings or repairs that are printed; the counts have all
MOST_IN_A_ROW = 3  # checks at which one rank has drifted: then something there is broken
_ADVICE = (
    "Averaged gradients do not part them: look for what one rank alone does to its model or optimizer, or for a faulty "
    "machine; DriftGuard(policy='repair') sends all what {whose}"
)


@dataclass(frozen=True)
class DriftGuard:
    """How replicas are compared; for `samestep.replicate(model, world, guard=…)`.

    Args:
        every: so many optimizer steps; the last ones of an epoch of :func:`samestep.shards` are looked at, too.
        policy: what happens where they differ. "stop" raises on every rank and names rank and tensors; "warn" does so
            as a warning, on the first rank; "repair" sends all ranks what most of them hold, and stops where the same
            rank has drifted at three checks in a row.
        optimizer_state: whether the optimizers' state and numbers (learning rate, betas) are compared, too. Not for
            ZeroRedundancyOptimizer, which gives each rank a part of it.
        buffers: whether buffers are compared, too. The running statistics of a BatchNorm that is not synchronised never
            are, and none on virtual ranks, whose slices have their own. A model that updates other buffers from its own
            samples holds different ones on every rank.
        resync_epochs: after so many epochs rank 0's parameters and buffers are sent to all, whatever was found; None
            never does.

    Raises:
        UsageError: a value is none of these.

    Example:
        >>> DriftGuard(every=100, policy="repair").every
        100
        >>> DriftGuard(every=0)
        Traceback (most recent call last):
        samestep.errors.UsageError: every=0 is no number of steps: give a whole number of at least 1, such as 16
    """

    every: int = 16
    policy: Policy = "stop"
    optimizer_state: bool = False
    buffers: bool = True
    resync_epochs: int | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.every):
            raise UsageError(
                f"every={self.every!r} is no number of steps: give a whole number of at least 1, such as 16"
            )
        if self.policy not in POLICIES:
            raise UsageError(f"policy={self.policy!r} is unknown: use 'stop', 'warn' or 'repair'")
        for name in ("optimizer_state", "buffers"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name}={value!r} must be True or False")
        if self.resync_epochs is not None and not _is_count(self.resync_epochs):
            raise UsageError(
                f"resync_epochs={self.resync_epochs!r} is no number of epochs: give a whole number of at least 1, or "
                "None to send no weights"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def guard_of(requested: int | DriftGuard | None) -> DriftGuard | None:
    """Returns what `guard=` of :func:`samestep.replicate` asks for.

    Example:
        >>> guard_of(100)
        DriftGuard(every=100, policy='stop', optimizer_state=False, buffers=True, resync_epochs=None)
    """
    if requested is None or isinstance(requested, DriftGuard):
        return requested
    if not _is_count(requested):
        raise UsageError(
            f"guard={requested!r} is unknown: give the steps from one check to the next, such as 16, or a DriftGuard"
        )
    return DriftGuard(every=requested)


class DriftMonitor:
    """The guard of one replica, at work.

    Collective: every rank must make it, for a model that is alike on all. Alone it does nothing. It can be given to
    `samestep.checkpoint(…, guard=model.drift)`, and then counts on after a resume.

    Args:
        module: the bare model.
        world: whose data axis holds its replicas.
        guard: how they are compared.

    Attributes:
        guard: likewise.
        active: where false, steps are not counted and nothing is looked at; the same on every rank.
        steps: that the model has taken.
        epochs: that it was trained in; see :meth:`end_epoch`.
        checks: how often the replicas were compared.
        found: checks at which they were not alike.
        repaired: of them, those after which they were made alike.
        last_alike: the step of the last check at which they were alike; None before.

    Example:
        >>> import samestep, torch
        >>> with samestep.world() as world:
        ...     model = samestep.replicate(torch.nn.Linear(2, 1).to(world.device), world)
        ...     drift = DriftMonitor(model.module, world, DriftGuard(every=1))
        ...     drift.check(), drift.checks
        (True, 0)
    """

    def __init__(self, module: nn.Module, world: World, guard: DriftGuard) -> None:
        self.guard = guard
        self.active = True
        self.steps = self.epochs = self.checks = self.found = self.repaired = 0
        self.last_alike: int | None = None
        self.number = world.next_id()
        self._module = weakref.ref(module)
        self._axis = world.data
        self._virtual = world.virtual is not None
        self._optimizer_steps = ModelStepCounter(keeps=guard.optimizer_state)
        self._in_a_row: dict[int, int] = {}  # by position: checks at which it has drifted, up to the last
        self._checked_at = 0  # which step was looked at last
        self._steps_at_epoch = 0
        if self._axis.size > 1:
            add_step_listener(self)

    def holds(self, optimizer: Optimizer) -> bool:
        return is_among(self._names(), optimizer)

    def note_step(self, optimizer: Optimizer, number: int) -> None:
        """An optimizer of this model, the `number`-th of all, has stepped. Collective: on every rank."""
        if not self.active or self._axis.closed or not self._optimizer_steps.begins_with(optimizer, number):
            return
        self.steps += 1
        if self.steps % self.guard.every == 0:
            self.check()

    @torch.no_grad()
    def check(self) -> bool:
        """Compares the replicas now; returns whether they are alike. Collective: every rank must call it.

        Raises:
            DriftError: they are not, and the policy is "stop", or it is "repair" and that is of no use.
            StepError: the ranks are at different steps, or the world was closed.
        """
        if self._axis.size == 1:
            return True
        self._axis.check_open()
        self.checks += 1
        self._checked_at = self.steps
        items = self._items()
        if self._are_equal(items):
            self.last_alike = self.steps
            self._in_a_row.clear()
            return True
        self.found += 1
        self._handle(items)
        return False

    def _are_equal(self, items: Sequence[StateItem]) -> bool:
        return same_everywhere(self._axis, digest_of_all(items, f"{self.number} {self.steps}"))

    def _handle(self, items: Sequence[StateItem]) -> None:
        found = self._differences(items)
        ranks = tuple(self._axis.ranks[position] for position in minority_ranks(found))
        text = f"the replicas of {self._model} are not alike: {describe(found, self._axis.ranks)}; {self._since()}"
        if self.guard.policy == "stop":
            whose = "the lower rank has" if self._axis.size == 2 else "most have"
            raise self._error(f"{text}. {_ADVICE.format(whose=whose)}", ranks)
        if self.guard.policy == "warn":
            if self._says(self.found):
                warn(f"{text}{_rest(self.found)}")
            return
        self._repair(found, items, text, ranks)

    def _differences(self, items: Sequence[StateItem]) -> list[Difference]:
        mine = {"at": [self.number, self.steps], "of": {item.name: [item.digest(), item.kind] for item in items}}
        everyone = all_gather_json(self._axis, mine)
        if any(one["at"] != mine["at"] for one in everyone):
            steps = ", ".join(
                f"rank {rank} at step {one['at'][1]} of model {one['at'][0]}"
                for rank, one in zip(self._axis.ranks, everyone, strict=True)
            )
            raise StepError(f"the ranks came to different checks of their replicas: {steps}")
        found = differences([one["of"] for one in everyone])
        if not found:
            raise self._error(
                f"the digests of all {self._model} differ, and those of its tensors do not: the ranks registered them "
                "in different orders, or memory does not hold what is written to it"
            )
        return found

    def _repair(
        self, found: Sequence[Difference], items: Sequence[StateItem], text: str, ranks: tuple[int, ...]
    ) -> None:
        drifted = {*minority_ranks(found), *(_UNKNOWN for one in found if not one.is_decided)}
        self._in_a_row = {position: self._in_a_row.get(position, 0) + 1 for position in drifted}
        again = sorted(position for position, times in self._in_a_row.items() if times >= MOST_IN_A_ROW)
        if again:
            raise self._again(tuple(self._axis.ranks[position] for position in again if position != _UNKNOWN), text)
        if unlike := [one.name for one in found if not one.can_be_sent]:
            raise self._error(f"{text}; {first_of(unlike)} cannot be repaired: not of one shape on all ranks", ranks)
        by_name = {item.name: item for item in items}
        for one in found:
            broadcast_item(by_name[one.name], self._axis, one.source)
        if not self._are_equal(self._items()):
            raise self._error(f"{text}; sent to all again, they still are not alike, so something is broken", ranks)
        self.repaired += 1
        self.last_alike = self.steps
        if self._says(self.repaired):
            sys.stderr.write(f"samestep: {text}; {self._sent(found)}{_rest(self.repaired)}\n")

    def _again(self, ranks: tuple[int, ...], text: str) -> DriftError:
        drifted_ranks = (
            f"{ranks_named(ranks)} {'has' if len(ranks) == 1 else 'have'} drifted"
            if ranks
            else "replicas have diverged"
        )
        state = (
            ""
            if self.guard.optimizer_state
            else ". Optimizers may differ, too, and are neither compared nor repaired without optimizer_state=True"
        )
        return self._error(
            f"{drifted_ranks} at {MOST_IN_A_ROW} checks in a row, so repairing does not help, and something "
            f"{'there ' if ranks else ''}is broken: {text}{state}",
            ranks,
        )

    def _sent(self, found: Sequence[Difference]) -> str:
        sources = sorted({self._axis.ranks[one.source] for one in found})
        whose = f"repaired: all have what {ranks_named(sources)} had"
        return whose if all(one.is_decided for one in found) else f"{whose}, be it right or wrong"

    def resync(self) -> None:
        """Sends rank 0's parameters and buffers to all, between two steps. Collective: every rank must call it.

        On virtual ranks the buffers stay, since the slices have their own.
        """
        self._axis.check_open()
        module = self._module()
        if self._axis.size == 1 or module is None:
            return
        broadcast_tensors([*module.parameters(), *(() if self._virtual else module.buffers())], self._axis)

    def end_epoch(self) -> None:
        """An epoch is over: compares the replicas after its last steps, or sends the weights if that is due.

        Collective. A loop in which the model was not trained is none. Called where a loop over :func:`samestep.shards`
        ends; with a loader of your own, call it on every rank.
        """
        if self.steps == self._steps_at_epoch and self._axis.size > 1:
            return  # a loop for evaluation
        self._steps_at_epoch = self.steps
        self.epochs += 1
        if self.guard.resync_epochs is not None and self.epochs % self.guard.resync_epochs == 0:
            self.resync()
        elif self.active and self._checked_at != self.steps:
            self.check()

    def release(self) -> None:
        """The world closes: says how many checks have found the replicas to differ, where not all was said."""
        if self.found > MOST_PRINTED and self._axis.rank == 0:
            fixed = f", and repaired {self.repaired} times" if self.guard.policy == "repair" else ""
            often = f"{self.found} of {self.checks} checks"
            sys.stderr.write(f"samestep: the replicas of {self._model} were not alike at {often}{fixed}\n")

    def state_dict(self) -> dict[str, int | None]:
        """Returns the counts, the same on every rank."""
        return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Counts on from there."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self._steps_at_epoch = self._checked_at = self.steps
        self._in_a_row.clear()

    def _names(self) -> dict[int, str]:
        module = self._module()
        return {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}

    def _items(self) -> list[StateItem]:
        module = self._module()
        if module is None:
            return []
        items = list(items_of_model(module, buffers=self.guard.buffers and not self._virtual))
        names = self._names()
        for place, optimizer in enumerate(self._optimizer_steps.optimizers()):
            items += items_of_optimizer(optimizer, names, place)
        return items

    @property
    def _model(self) -> str:
        return type(self._module()).__name__

    def _since(self) -> str:
        if self.last_alike is None:
            return f"found at step {self.steps}; no check before it found them alike"
        return f"after step {self.last_alike} they were alike, at step {self.steps} no longer"

    def _says(self, count: int) -> bool:
        return self._axis.rank == 0 and count <= MOST_PRINTED

    def _error(self, text: str, ranks: tuple[int, ...] = ()) -> DriftError:
        return DriftError(text, ranks=ranks, mine=self._axis.ranks[self._axis.rank])

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())  # a saved or copied model is guarded once it is replicated


_UNKNOWN = -1  # in the place of a rank, where nobody can tell which it is
_COUNTS = ("steps", "epochs", "checks", "found", "repaired", "last_alike")


def _rest(count: int) -> str:
    return "; more will only be counted" if count == MOST_PRINTED else ""


def same_everywhere(axis: Axis, word: int) -> bool:
    """Whether all ranks of the axis hold the same int64, by one all-reduce of 16 bytes [1]. Collective."""
    assert axis.control is not None
    pair = torch.tensor([word, ~word])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    axis.control.allreduce([pair], options).wait()
    largest, other = pair.tolist()
    return bool(largest == ~other)


def broadcast_item(item: StateItem, axis: Axis, source: int) -> None:
    """Gives all ranks an item as the one at position `source` has it, in place. Collective."""
    if isinstance(item.value, torch.Tensor):
        broadcast_tensors([item.value], axis, source)
        return
    value = broadcast_json(axis, item.value, source)
    item.home[item.key] = tuple(value) if isinstance(item.value, tuple) else value
