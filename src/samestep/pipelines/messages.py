"""Activations ahead and gradients back, between the ranks of a pipeline: through memory, or over torch.distributed.

Nobody waits to send. CPUs of one host lay messages down for each other (:mod:`samestep.pipelines.shelves`). Elsewhere
who receives has said so before: the buffers of the next few messages of each neighbour wait for them, in the order in
which he sends, which the plan knows. So a message travels while both compute.

The shapes are found out once for each shape of micro-batch: the first message of a kind is preceded by a header, and
both sides remember it. torch.distributed.pipelining finds them out by running every stage once more, in training, on
garbage (torch 2.13): running statistics and random streams are others after it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import progress
from samestep.errors import DataError, ModelError, StepError
from samestep.instrument.patch import call_site
from samestep.pipelines.batch import Kinds
from samestep.pipelines.forms import LENGTH, MOST_TENSORS, Form, Forms, header, read, told
from samestep.pipelines.shelves import Shelf
from samestep.runtime.axis import Axis
from samestep.schedule.plan import Action, Schedule

__all__: list[str] = []

AHEAD = 2  # messages of a neighbour that are waited for before they are needed
_TAGS = MOST_TENSORS + 1  # of a message: its header, then its tensors


@dataclass
class _Coming:
    """A message that is waited for."""

    forms: Forms
    tensors: list[Tensor]
    works: list[Any]


class _waiting:  # noqa: N801  (as contextlib's, and quicker: one is entered for every message)
    """Notes that this rank waits for another, for those who explain hangs."""

    def __init__(self, what: str) -> None:
        progress.enter_collective(what, call_site(sys._getframe()))  # noqa: SLF001

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        progress.exit_collective()


class Messages:
    """One rank's messages in the steps of a plan.

    Args:
        plan: of every step.
        axis: the ranks of the pipeline, in the order of the plan's.
        device: that tensors are wanted on.
        shelves: to ranks that share memory with this one, by their positions.
    """

    def __init__(
        self, plan: Schedule, axis: Axis, device: torch.device, shelves: Mapping[int, Shelf] | None = None
    ) -> None:
        self._shelves = shelves or {}
        self._plan = plan
        self._axis = axis
        self._device = device
        self._from: dict[int, list[Action]] = {
            source: [one for one in order if plan.taker(one) == axis.rank] if source != axis.rank else []
            for source, order in enumerate(plan.orders)
        }
        self._places = {one: place for sent in self._from.values() for place, one in enumerate(sent)}
        self._sends: dict[Action, int] = {}
        counts: defaultdict[int, int] = defaultdict(int)
        for one in plan.orders[axis.rank]:
            if (target := plan.taker(one)) not in {None, axis.rank}:
                self._sends[one] = counts[target or 0]
                counts[target or 0] += 1
        self._counts = counts
        self._known: dict[Hashable, Forms] = {}
        self._kinds: Kinds = ()
        self._posted: dict[int, int] = {}
        self._coming: dict[Action, _Coming] = {}
        self._going: list[tuple[Any, Tensor]] = []

    def begin(self, kinds: Kinds) -> None:
        """A step begins.

        Args:
            kinds: by micro-batch, something that is the same on all ranks, and for micro-batches of one shape.
        """
        self._kinds = kinds
        self._posted = dict.fromkeys(self._from, 0)
        for other, shelf in self._shelves.items():
            shelf.begin(self._counts[other], len(self._from[other]))

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Sends what an action gives to the rank that needs it; does not wait.

        Raises:
            ModelError: it is not what micro-batches of this kind were before, or too much to tell.
        """
        target, tag = self._target(action), self._sends[action] * _TAGS
        forms = tuple(map(Form.of, tensors))
        known = self._known.get(self._key(action))
        words: list[Tensor] = []
        if known is None:
            known = forms
            self._remember(action, forms)
            words = [header(action.stage, forms)]
        elif len(known) != len(forms) or not all(map(Form.is_like, known, forms)):
            raise ModelError(
                f"stage {action.stage} gives {told(forms)} for a micro-batch of a shape for which it gave "
                f"{told(known)} before: what it gives may depend on shapes alone"
            )
        if target in self._shelves:
            laid = [form.ordered(tensor) for form, tensor in zip(known, tensors, strict=True)]
            self._shelves[target].lay([*words, *laid])
            return
        for each in words:
            self._go(each.to(self._device), target, tag)  # where it is waited for: a backend a device
        for place, (form, tensor) in enumerate(zip(known, tensors, strict=True), 1):
            self._go(form.packed(tensor), target, tag + place)

    def receive(self, action: Action) -> tuple[list[Tensor], list[bool]]:
        """Returns what an action of another rank gives, and for which of it gradients are wanted."""
        source = self._plan.placement[action.stage]
        with _waiting(f"recv from stage {action.stage}"):
            if source in self._shelves:
                self._take(source, self._places[action] + 1)
            else:
                self._post(source, self._places[action] + 1, heard=True)
                self._post(source, self._places[action] + 1 + AHEAD, heard=False)
            coming = self._coming.pop(action)
            for work in coming.works:
                work.wait()
        tensors = [form.unpacked(sent) for form, sent in zip(coming.forms, coming.tensors, strict=True)]
        return tensors, [form.wants_gradient for form in coming.forms]

    def end(self) -> None:
        """Waits until all that was sent has gone."""
        for other, shelf in self._shelves.items():
            with nullcontext() if shelf.is_seen else _waiting(f"send to rank {self._axis.ranks[other]}"):
                shelf.end()
        for work, _ in self._going:
            work.wait()
        self._going.clear()

    def _take(self, source: int, end: int) -> None:
        """Takes a rank's messages up to `end`, as they have been laid down."""
        for action in self._from[source][self._posted[source] : end]:
            forms = self._known.get(self._key(action))
            message = self._shelves[source].take()
            if forms is None:
                forms = read(message.read(torch.int64, [LENGTH]).tolist())
                self._remember(action, forms)
            tensors = [message.read(form.dtype, form.sizes) for form in forms]
            message.done()
            self._coming[action] = _Coming(forms, tensors, [])
            self._posted[source] += 1

    def _post(self, source: int, end: int, *, heard: bool) -> None:
        """Posts the buffers of a rank's messages up to `end`; of those of unknown forms only once that is `heard`."""
        sent = self._from[source]
        while self._posted[source] < min(end, len(sent)):
            action = sent[self._posted[source]]
            tag = self._posted[source] * _TAGS
            forms = self._known.get(self._key(action))
            if forms is None and not heard:
                return
            if forms is None:
                forms = self._hear(source, tag)
                self._remember(action, forms)
            tensors = [form.blank(self._device) for form in forms]
            works = [self._come(tensor, source, tag + place) for place, tensor in enumerate(tensors, 1)]
            self._coming[action] = _Coming(forms, tensors, works)
            self._posted[source] += 1

    def _hear(self, source: int, tag: int) -> Forms:
        words = torch.empty(LENGTH, dtype=torch.int64, device=self._device)
        self._come(words, source, tag).wait()
        return read(words.tolist())

    def _key(self, action: Action) -> Hashable:
        try:
            kind = self._kinds[action.micro_batch]
        except (DataError, ModelError, StepError):  # on all ranks alike, which may have begun steps of other lengths
            for shelf in self._shelves.values():
                shelf.withdraw()
            raise
        return action.kind == "F", action.stage, kind

    def _remember(self, action: Action, forms: Forms) -> None:
        self._known[self._key(action)] = forms

    def _target(self, action: Action) -> int:
        target = self._plan.taker(action)
        assert target is not None
        return target

    def _go(self, tensor: Tensor, target: int, tag: int) -> None:
        work = dist.isend(tensor, self._axis.ranks[target], group=self._axis.group, tag=tag)
        self._going.append((work, tensor))

    def _come(self, tensor: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(tensor, self._axis.ranks[source], group=self._axis.group, tag=tag)
