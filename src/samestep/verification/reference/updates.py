"""Steps of the script alone that start from what the ranks had: their gradients, learning rates and optimizer state.

    ranks    p, s, g, rate ──► optimizer ──► p', s'      alone    the same p, s, g, rate ──► optimizer ──► p'', s''

So p' and p'' differ only by what the optimizer does, not by rounding in gradients, which Adam's first steps enlarge.
The rates of all steps are the ranks', since a rate that is scaled by their number is judged by itself.
"""

from __future__ import annotations

from typing import Any

from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.recording.optimizers import Optimizers, own_states, uncut

__all__: list[str] = []


class UpdateReplay:
    """Prepares the steps of one run."""

    def __init__(self, record: Record, optimizers: Optimizers) -> None:
        self._record = record
        self._optimizers = optimizers
        self._rates: list[tuple[Any, Any, Any]] = []  # group, its own rate, the ranks'

    def put_back(self, states: dict[str, dict[str, Any]]) -> None:
        """Gives the optimizers the state that the ranks' had, by the names of their parameters."""
        for name, parameter, mine in own_states(self._optimizers):
            for key, value in states.get(name, {}).items():
                own: Any = parameter.of(mine.get(key)) if hasattr(parameter, "owner") else uncut(mine.get(key))
                if not hasattr(value, "shape"):
                    mine[key] = value
                elif hasattr(own, "copy_") and own.shape == value.shape:
                    own.copy_(value)

    def before(self, optimizer: Any, parameters: dict[str, Any], step: Event) -> None:
        """Sets the rates of a step, and its gradients where the ranks' are kept and one evaluation makes them."""
        groups = [group for group in optimizer.param_groups if "lr" in group]
        for group, rate in zip(groups, step["rates"], strict=False):
            if not hasattr(group["lr"], "shape"):
                self._rates.append((group, group["lr"], rate))
                group["lr"] = rate
        updated = self._record.updated(step)
        if step["kept"] is None or updated is None or updated["evaluations"] > 1:
            return
        import torch

        gradients = self._record.used(step)
        with torch.no_grad():
            for name, parameter in parameters.items():
                own, value = uncut(parameter.grad), gradients.get(name)
                if own is not None and value is not None and own.shape == value.shape and own.layout == value.layout:
                    own.copy_(value)

    def after(self) -> None:
        """Gives the groups their own rates again, from which their schedule goes on."""
        for group, own, theirs in self._rates:
            if group["lr"] == theirs:
                group["lr"] = own
        self._rates.clear()
