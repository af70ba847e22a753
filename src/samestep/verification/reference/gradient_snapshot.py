"""Copies of the gradients of one process when a step's last backward is over, before clipping.

Compressed gradients are compared with them, and those of ranks whose samples no DataLoader yields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from samestep.verification.judging.record import Rank
from samestep.verification.recording.naming import of_optimizer, owner_of
from samestep.verification.recording.optimizers import uncut


class GradientSnapshot:
    """Copies, at the steps whose gradients the first rank has `recorded` as compressed, or `always`."""

    def __init__(self, recorded: Rank, *, always: bool = False) -> None:
        self._always = always
        self._events = {event["event"] for event in recorded.of("compressed")}
        self._copies: dict[int, Any] = {}

    def note(self, event: int, optimizers: Iterable[Any], scale: float) -> None:
        """A backward pass of a step has ended, whose loss was multiplied by `scale`."""
        if self._always or event in self._events:
            gradients = {id(one): one.grad for each in optimizers for one in of_optimizer(each)}
            self._copies = {key: uncut(one).detach() / scale for key, one in gradients.items() if one is not None}

    def of(self, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns those of some parameters; None where they are not asked for, or no backward has been."""
        if not self._copies:
            return None
        kept = {name: self._copies.get(owner_of(one)) for name, one in parameters.items()}
        return {name: one.of(kept[name]) if hasattr(one, "owner") else kept[name] for name, one in parameters.items()}

    def forget(self) -> None:
        self._copies = {}
