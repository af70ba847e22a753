"""Records compressed gradients before and after they are averaged, and each rank's error feedback."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from samestep.runtime.digest import digest
from samestep.verification.journal import TraceWriter
from samestep.verification.recording.naming import of_optimizer

_BEFORE = "compressed gradients were averaged before another optimizer's step"
_BROKEN_OFF = "a backward pass whose gradients are compressed was broken off"


class Compressing:
    """The models of a process whose gradients are compressed, numbered as they are replicated.

    The `first` rank keeps averaged gradients, which all ranks have; `wanted` says whether values are kept now.
    """

    def __init__(self, journal: TraceWriter, *, first: bool, wanted: Callable[[], bool]) -> None:
        self.journal = journal
        self.first = first
        self.wanted = wanted
        self._models: list[_Model] = []

    def add(self, compression: Any, model: Any, seed: int, where: str) -> None:
        number = len(self._models)
        shapes = [[name, list(parameter.shape)] for name, parameter in model.named_parameters()]
        declared = compression.codec.declared()
        self.journal.write("compresses", number=number, declared=declared, seed=seed, shapes=shapes, where=where)
        self._models.append(_Model(self, number, compression, model))
        compression.watch = self._models[-1].take

    def settle(self, event: int) -> None:
        """A backward pass has ended; one inside another has not yet averaged anything."""
        import torch

        if self._models and torch._C._current_graph_task_id() == -1:  # noqa: SLF001  (nothing public tells)
            for model in self._models:
                model.settle(event)

    def tell(self, optimizer: Any, event: int, scale: float) -> None:
        for model in self._models:
            model.tell(optimizer, event, scale)

    def forget(self) -> None:
        for model in self._models:
            model.forget()


class _Model:
    """One of them; holds nothing of it alive."""

    def __init__(self, shared: Compressing, number: int, compression: Any, module: Any) -> None:
        self._shared = shared
        self._number = number
        self._compression = weakref.ref(compression)
        self._module = weakref.ref(module)
        self._about: dict[str, Any] = {}  # the reduction
        self._before: dict[str, Any] = {}  # digests of what the rank remembered
        self._is_due = False
        self.forget()

    def forget(self) -> None:
        self._reductions = 0
        self._values: dict[str, dict[str, Any]] = {"before": {}, "own": {}, "averaged": {}}
        self._digests: dict[str, str] = {}

    def take(self, axis: Any, bucket: Any) -> None:
        if bucket.index() == 0:
            self._begin(self._compression(), axis)
        self._is_due = bucket.is_last()
        if self._shared.wanted():
            names = {id(parameter): name for name, parameter in self._named().items()}
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._values["own"][names[id(parameter)]] = gradient.detach().clone()

    def _begin(self, compression: Any, axis: Any) -> None:
        """While nothing is under way; the other buckets' memories are being changed when they come."""
        import torch

        state = compression.memory.state()
        self._before = _digests_of(state)
        self._about = {
            "reduction": compression.steps,
            "size": axis.size,
            "threads": torch.get_num_threads(),
            "precision": torch.get_float32_matmul_precision(),
        }
        self._reductions += 1
        if self._shared.wanted():
            self._values["own"] = {}
            self._values["before"] = {
                kind: {name: part.clone() for name, part in pieces.items()} for kind, pieces in state.items()
            }

    def settle(self, event: int) -> None:
        """Writes down what the rank owes now, and looks at what it got."""
        compression = self._compression()
        if not self._is_due or compression is None:
            return
        self._is_due = False
        about = {"number": self._number, "reduction": self._about["reduction"], "before": self._before}
        self._shared.journal.write("owed", event=event, **about, after=_digests_of(compression.memory.state()))
        if self._shared.wanted():
            named = self._named()
            averaged = {name: named[name].grad for name in self._values["own"] if named[name].grad is not None}
            self._digests = {name: digest(gradient) for name, gradient in averaged.items()}
            if self._shared.first:
                self._values["averaged"] = {name: gradient.detach().clone() for name, gradient in averaged.items()}

    def tell(self, optimizer: Any, event: int, scale: float) -> None:
        names = {id(parameter): name for name, parameter in self._named().items()}
        held = {names[id(one)]: one.grad for one in of_optimizer(optimizer) if id(one) in names}
        if not held:
            return
        why, journal = self._why_not(held), self._shared.journal
        journal.write(
            "compressed",
            event=event,
            number=self._number,
            names=[names.get(id(one)) for one in of_optimizer(optimizer)],
            why=why,
            scale=scale,
            averaged=self._digests,
            kept=journal.keep(self._values) if why is None else None,
            **self._about,
        )

    def _why_not(self, held: Mapping[str, Any]) -> str | None:
        """Why it does not tell what the optimizer's gradients were before they were averaged; None where it does."""
        if self._is_due:
            return _BROKEN_OFF
        if self._reductions != 1:
            return (
                f"compressed gradients are averaged {self._reductions} times in a step" if self._reductions else _BEFORE
            )
        missing = [name for name, gradient in held.items() if gradient is not None and name not in self._digests]
        return f"the gradient of {missing[0]} is not compressed as the others are" if missing else None

    def _named(self) -> dict[str, Any]:
        module = self._module()
        return {} if module is None else dict(module.named_parameters())


def _digests_of(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    return {kind: {name: digest(part) for name, part in pieces.items()} for kind, pieces in state.items()}
