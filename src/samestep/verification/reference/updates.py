"""Steps of the script alone that start from what the ranks had: gradients, rates, settings and optimizer state.

So the updates differ only by what the optimizer does, not by rounding in gradients, which Adam's first steps enlarge.
"""

from __future__ import annotations

from typing import Any

from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.judging.states import averaged_behind
from samestep.verification.recording.optimizers import Optimizers, named_parameters, own_states, uncut


class UpdateReplay:
    """Prepares the steps of one run."""

    def __init__(self, record: Record, optimizers: Optimizers) -> None:
        self._record = record
        self._optimizers = optimizers
        self._steps_are_averaged = averaged_behind(record) is not None
        self._lent: list[tuple[Any, str, Any, Any]] = []  # group, name of a number, its own value, the ranks'

    def put_back(self, states: dict[str, dict[str, Any]]) -> None:
        """Gives the optimizers the state that the ranks' had, by the names of their parameters."""
        known = set()
        for name, parameter, mine in own_states(self._optimizers):
            known.add(name)
            for key, value in states.get(name, {}).items():
                own: Any = parameter.of(mine.get(key)) if hasattr(parameter, "owner") else uncut(mine.get(key))
                if value is None:  # parts that cannot be put together, such as partial sums
                    continue
                if not hasattr(value, "shape"):
                    mine[key] = value
                elif hasattr(own, "copy_") and own.shape == value.shape:
                    own.copy_(value)
        for name, optimizer, parameter in named_parameters(self._optimizers):
            if name in states and name not in known and _is_plain(parameter):  # one process has not stepped it yet
                optimizer.state[parameter] = _placed(optimizer, parameter, states[name])

    def before(self, optimizer: Any, parameters: dict[str, Any], step: Event) -> None:
        """Sets the rates of a step, and its gradients where the ranks' are kept and one evaluation makes them.

        Rates and settings (weight decay, momentum) are always the ranks': one that is scaled by their number is judged
        by itself.
        """
        if self._record.is_alike:
            self._lend_settings(optimizer, step)
        else:
            self._lend_rates(optimizer, parameters, step)
        updated = self._record.updated(step)
        if step["kept"] is None or updated is None or updated["evaluations"] > 1 or self._steps_are_averaged:
            return
        import torch

        mine = self._optimizers.gradients(optimizer)
        within = self._record.averages_within(step)
        gradients = _as_one_process_has(self._record, step, mine) if within else self._record.used(step)
        with torch.no_grad():
            for name, parameter in parameters.items():
                own, value = uncut(mine[name]), gradients.get(name)
                if value is None and _is_plain(parameter) and not within:
                    parameter.grad = None
                elif value is None:
                    continue
                elif _is_plain(parameter) and parameter.shape == value.shape and (own is None or own.is_sparse):
                    parameter.grad = value.to(parameter)  # of a sparse one `.data` would be changed alone
                elif own is not None and own.shape == value.shape and own.layout == value.layout:
                    own.copy_(value)

    def _lend_settings(self, optimizer: Any, step: Event) -> None:
        groups = [group for group in optimizer.param_groups if "lr" in group]
        for group, rate in zip(groups, step["rates"], strict=False):
            self._lend(group, "lr", rate)
        for group, settings in zip(optimizer.param_groups, step["settings"], strict=False):
            for name, value in settings.items():
                own = group.get(name)
                if not _is_tensor(own):
                    self._lend(group, name, tuple(value) if isinstance(own, tuple) else value)

    def _lend_rates(self, optimizer: Any, parameters: dict[str, Any], step: Event) -> None:
        """Where each rank's optimizer holds other parameters, their groups are others, too."""
        same = [(rank, one) for rank in self._record.ranks for one in rank.steps if one["event"] == step["event"]]
        rates = {name: rate for rank, one in same for name, rate in rank.rates_by_name(one).items()}
        names = {id(getattr(one, "owner", one)): name for name, one in parameters.items()}
        for group in optimizer.param_groups:
            found = {rates[name] for one in group["params"] if (name := names.get(id(one))) in rates}
            if len(found) == 1:
                self._lend(group, "lr", found.pop())

    def _lend(self, group: Any, name: str, value: Any) -> None:
        if name not in group or group[name] == value:
            return
        if _is_tensor(group[name]):  # which a compiled optimizer has taken for its own
            own = group[name].clone()
            group[name].fill_(value)
            self._lent.append((group, name, own, group[name].clone()))
        else:
            self._lent.append((group, name, group[name], value))
            group[name] = value

    def after(self) -> None:
        """Gives the groups their own numbers again, from which their schedules go on."""
        for group, name, own, theirs in self._lent:
            if group[name] == theirs and _is_tensor(own):
                group[name].copy_(own)
            elif group[name] == theirs:
                group[name] = own
        self._lent.clear()


def _placed(optimizer: Any, parameter: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state on the device that the optimizer keeps it on: counters of steps may stay on the host."""
    group = next(one for one in optimizer.param_groups if any(held is parameter for held in one["params"]))
    stays = () if group.get("fused") or group.get("capturable") else ("step",)
    return {
        key: value.to(parameter.device) if _is_tensor(value) and key not in stays else value
        for key, value in state.items()
    }


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "layout")  # a NumPy number, which a schedule may compute, has a shape, too


def _is_plain(parameter: Any) -> bool:
    return not hasattr(parameter, "_local_tensor") and not hasattr(parameter, "owner")


def _as_one_process_has(record: Record, step: Event, own: dict[str, Any]) -> dict[str, Any]:
    """Returns the ranks' gradients as one process has them before its own code steps; nothing where they are others."""
    from samestep.verification.numerics import distance, limit, mean, nearest

    there = {name: own[name] for name in step["gradients"] if name in own}
    if not (parts := record.parts(step)):
        return {}
    found, _ = nearest(mean(parts), there, record.size)
    return found if distance(found, there).whole <= limit(0.0, found) else {}
