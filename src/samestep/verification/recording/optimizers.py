"""The optimizers of a process, numbered as they are made, and what they hold: parameters, buffers, state."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from samestep.runtime.digest import digest
from samestep.verification.journal import TraceWriter
from samestep.verification.recording.containers import named_tensors
from samestep.verification.recording.naming import (
    bare,
    buffers_of,
    foreign_buffers_of,
    held_by,
    made_at,
    named,
    of_optimizer,
    others_of,
    owner_of,
    roots,
    untrained_of,
)

UNNAMED = "parameter "  # of an optimizer, which no model has
TRAINED = "trained model "  # one of which an optimizer holds a part
_OF_PROCESS = re.compile(r"(?:^|_)(?:rank|world|replicas|num_processes)(?:_|$)")


class Optimizers:
    """All of them; torch is imported when the first one is there.

    Attributes:
        known: number of an optimizer, and of its parameters -> names to take for these.
    """

    def __init__(self, journal: TraceWriter) -> None:
        self._journal = journal
        self.known: dict[tuple[int, int], list[str]] = {}
        self._named: dict[int, list[str]] = {}
        self._held: weakref.WeakKeyDictionary[Any, dict[int, list[Any]]] = weakref.WeakKeyDictionary()
        self._beside: dict[int, dict[str, Any]] = {}
        self._made: list[weakref.ref[Any]] = []  # a script that lets one go shall have its memory back
        self._models: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._numbered = itertools.count(1)
        self._numbered_trained = itertools.count(1)
        self._taken: Any = None  # the first parameter of an optimizer -> steps that were taken with it
        self._untrained: dict[str, Any] | None = None  # name -> digest, when they were first looked at

    @property
    def all(self) -> list[Any]:
        """Those that are alive, in the order in which they were made."""
        return [optimizer for made in self._made if (optimizer := made()) is not None]

    def rates(self) -> list[float]:
        return [rate for optimizer in self.all for rate in rates_of(optimizer)]

    def add(self, optimizer: Any, where: str) -> None:
        """Numbers an optimizer, unless it has its number."""
        if "samestep_number" not in optimizer.__dict__:
            optimizer.samestep_number = len(self._made)
            optimizer.samestep_steps = 0
            self._made.append(weakref.ref(optimizer))
            name = type(optimizer).__name__
            self._journal.write("optimizer", number=optimizer.samestep_number, name=name, where=where)

    def taken(self, optimizer: Any, begun: int = 0) -> int:
        """Counts a step, from `begun`; an optimizer that is made anew for the same parameters goes on counting."""
        from torch.utils.weak import WeakIdKeyDictionary

        if self._taken is None:
            self._taken = WeakIdKeyDictionary()
        first = next(iter(of_optimizer(optimizer)), optimizer)
        self._taken[first] = self._taken.get(first, begun) + 1
        return int(self._taken[first])

    def have_trained(self, optimizer: Any) -> bool:
        """Whether steps were taken with the parameters of an optimizer, by it or by an earlier one."""
        return self._taken is not None and next(iter(of_optimizer(optimizer)), optimizer) in self._taken

    @staticmethod
    def is_by_hand(optimizer: Any) -> bool:
        return hasattr(optimizer, "returned")

    def gradients(self, optimizer: Any) -> dict[str, Any]:
        returned = getattr(optimizer, "returned", {})
        parameters = self.parameters(optimizer).items()
        return {name: returned.get(id(one)) if one.grad is None else one.grad for name, one in parameters}

    def parameters(self, optimizer: Any) -> dict[str, Any]:
        """Returns name -> parameter, in the optimizer's order; named when they are first asked for.

        Of a flat parameter (FSDP1) it is the parameters that lie in it.
        """
        number = optimizer.samestep_number
        parameters = self._slices(optimizer, of_optimizer(optimizer))
        names = self._named.get(number)
        if names is None or len(names) != len(parameters):
            names, parameters = self._name(optimizer)
            self._named[number] = names
            self._beside.pop(number, None)
            shapes = [list(parameter.shape) for parameter in parameters]
            made = made_at(parameters)
            index = {id(one): place for place, group in enumerate(optimizer.param_groups) for one in group["params"]}
            groups = [index.get(id(getattr(parameter, "owner", parameter)), 0) for parameter in parameters]
            about = {"names": names, "shapes": shapes, "made": made, "groups": groups}
            self._journal.write("names", optimizer=number, **about)
        return dict(zip(names, parameters, strict=True))

    def _name(self, optimizer: Any) -> tuple[list[str], list[Any]]:
        """Looks for an optimizer's parameters in the models that are alive."""
        owners = of_optimizer(optimizer)
        found = held_by(owners)
        cut = {key: list(held.values()) for key, held in found.items() if hasattr(next(iter(held.values())), "owner")}
        self._held[optimizer] = cut
        names = [name for i, owner in enumerate(owners) for name in found.get(id(owner), {f"{UNNAMED}{i}": owner})]
        known = self.known.get((optimizer.samestep_number, len(names)), [])
        is_known = bool(known) and sorted(known) != sorted(names)  # else in an order of its own
        return known if is_known else names, self._slices(optimizer, owners)

    def _slices(self, optimizer: Any, owners: list[Any]) -> list[Any]:
        cut = self._held.get(optimizer) or {}
        return [one for owner in owners for one in cut.get(id(owner), [owner])] if cut else owners

    def beside(self, optimizer: Any) -> dict[str, Any]:
        """Returns the trained parameters of its models that no optimizer here holds: another rank's may."""
        number = optimizer.samestep_number
        if number not in self._beside:
            self._beside[number] = others_of(of_optimizer(optimizer), self._every_parameter())
        return self._beside[number]

    def buffers(self) -> dict[str, Any]:
        return buffers_of(self._every_parameter())

    def buffers_in_use(self) -> dict[str, Any]:
        """Returns those of modules that are not in training mode, in which statistics are made and not used."""
        return buffers_of(self._every_parameter(), evaluating=True)

    def foreign_buffers(self) -> dict[str, Any]:
        """Returns the buffers of modules that hold none of their parameters: a loss with a running state, say."""
        return foreign_buffers_of(self._every_parameter())

    def _every_parameter(self) -> list[Any]:
        return [parameter for optimizer in self.all for parameter in of_optimizer(optimizer)]

    def values(self) -> dict[str, Any]:
        """Returns what steps change: the parameters, by the number of their optimizer, all buffers, and `changed`.

        Of what is cut over the ranks it is this rank's parts.
        """
        kept = {optimizer.samestep_number: held(self.parameters(optimizer)) for optimizer in self.all}
        states = held_states(state_of(self))
        return {"parameters": kept, "buffers": self.buffers(), "states": states, "untrained": self._changed()}

    def updated(self, optimizer: Any) -> dict[str, Any]:
        """Returns what a step has made of an optimizer's parameters, and of the state of all optimizers."""
        return {"parameters": held(self.parameters(optimizer)), "states": held_states(state_of(self))}

    def untrained(self) -> dict[str, Any]:
        """Returns the parameters that no optimizer holds: of a teacher that follows its student, or frozen ones.

        Models are numbered as they are first seen here: one that is gone takes no other's number with it. Those of
        which an optimizer holds a part are numbered by themselves, since in one process it may hold all.
        """
        found: dict[str, Any] = {}
        stepped = self._every_parameter()
        held_ids = {id(parameter) for parameter in stepped}
        models = list(untrained_of(stepped))
        if any(model not in self._models for model, _ in models):
            del models
            gc.collect()  # of what the script has dropped, more may be left on one rank than on another
            models = list(untrained_of(stepped))
        for model, parameters in models:
            if model not in self._models:
                is_trained = any(owner_of(one) in held_ids for _, one in named(model))
                number = next(self._numbered_trained if is_trained else self._numbered)
                self._models[model] = f"{TRAINED}{number}" if is_trained else f"model {number}"
            found |= {f"{self._models[model]}: {name}": one for name, one in parameters.items()}
        return found

    def averaged(self, model: Any) -> dict[str, Any]:
        """Returns the parameters of a model none of which an optimizer holds: an average, or a teacher."""
        stepped = {id(parameter) for parameter in self._every_parameter()}
        found = {bare(name): parameter for name, parameter in model.named_parameters()}
        is_known = any(id(one) in stepped or hasattr(one, "_local_tensor") for one in found.values())
        return {} if is_known else found

    def _changed(self) -> dict[str, Any]:
        """Those of them that are not what they were at the first call; all that are cut, a part may be unchanged."""
        parameters = self.untrained()
        reported = digests(parameters)
        if self._untrained is None:
            self._untrained = reported
        changed = {
            name: one for name, one in parameters.items() if self._untrained.get(name) != reported[name] or _is_cut(one)
        }
        return held(changed)

    def digests(self) -> dict[str, dict[str, str]]:
        """Returns what tells all parameters and buffers from others; two optimizers may use a name for two."""
        parameters = {
            f"optimizer {optimizer.samestep_number}: {name}" if optimizer.samestep_number else name: parameter
            for optimizer in self.all
            for name, parameter in self.parameters(optimizer).items()
        }
        return {"parameters": digests(parameters), "buffers": digests(self.buffers())}

    def states(self) -> list[dict[str, Any]]:
        """Returns the rate and the state of every optimizer: what a checkpoint must bring back."""
        reported = []
        for optimizer in self.all:
            # a parameter without numbers here (FSDP1: another rank has them) has no state, or the counters of one
            states = [state for key, state in optimizer.state.items() if not hasattr(key, "numel") or key.numel()]
            tensors = [tensor for _, tensor in named_tensors(states)]
            kept = sorted(map(digest, tensors))
            placed = sorted(str(one.placements) for one in tensors if hasattr(one, "placements"))  # of DTensors
            names = [
                name
                for name, one in self.parameters(optimizer).items()
                if getattr(one, "owner", one) in optimizer.state
            ]
            about = {"state": kept, "placed": placed, "rates": rates_of(optimizer), "names": names}
            reported.append({"number": optimizer.samestep_number, **about})
        return reported

    def state_digests(self, optimizer: Any) -> dict[str, list[str]]:
        """Returns what tells the state of each parameter from others, of those that have one."""
        named = {name: getattr(one, "owner", one) for name, one in self.parameters(optimizer).items()}
        states = {name: optimizer.state[one] for name, one in named.items() if one in optimizer.state}
        return {name: sorted(digest(tensor) for _, tensor in named_tensors(state)) for name, state in states.items()}

    def unheld(self) -> list[tuple[str, bool]]:
        """Returns the parameters that have a gradient and no optimizer, and whether one holds others of their model."""
        held = {id(parameter) for parameter in self._every_parameter()}
        found = []
        for root in roots():
            pairs = [(name, one, owner_of(one) in held) for name, one in named(root)]
            trained = any(is_held for _, _, is_held in pairs)
            found += [(name, trained) for name, one, is_held in pairs if not is_held and one.grad is not None]
        return found

    def probe(self) -> float | None:
        """Returns the norm of one gradient, always of the same parameter; of a cut one only all ranks know it."""
        first = next((one for one in self._every_parameter() if one.grad is not None), None)
        in_fsdp = hasattr(first, "_local_tensor") or getattr(first, "_fsdp_flattened", False)
        return None if first is None or in_fsdp else float(first.grad.norm())

    def hold_gradients(self) -> bool:
        """Whether a backward pass adds to gradients: of one parameter there is one, which is not zero."""
        first = next((one.grad for one in self._every_parameter() if one.grad is not None), None)
        return first is not None and bool(_part_of(first).norm())

    @property
    def holds_parts(self) -> bool:
        return any(_is_cut(parameter) for optimizer in self.all for parameter in self.parameters(optimizer).values())

    @property
    def are_replicas(self) -> bool:
        """Whether this rank has all that others have: no parameter is cut, no optimizer holds a part of a model."""
        if self.holds_parts:
            return False
        return not any(self.beside(optimizer) or _has_state_of_some(optimizer) for optimizer in self.all)


def _has_state_of_some(optimizer: Any) -> bool:
    """Whether an optimizer that has stepped holds state of some of its parameters alone."""
    states = {id(parameter) for parameter in optimizer.state}
    return bool(states) and any(id(parameter) not in states for parameter in of_optimizer(optimizer))


def rates_of(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a parameter group but for its learning rate: weight decay, momentum, betas.

    Those that tell which process of how many this is are none, as a group has them that deals its parameters out.
    """
    return {
        name: value
        for name, value in group.items()
        if name != "lr"
        and not _OF_PROCESS.search(name)
        and (
            isinstance(value, int | float)
            or (isinstance(value, tuple) and all(isinstance(one, int | float) for one in value))
        )
    }


def state_of(optimizers: Optimizers) -> dict[str, dict[str, Any]]:
    """Returns the state of all optimizers by the names of their parameters, as they hold it."""
    return {
        name: {key: parameter.of(value) for key, value in state.items()} if hasattr(parameter, "owner") else state
        for name, parameter, state in own_states(optimizers)
    }


def own_states(optimizers: Optimizers) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields name, parameter, and the state of what an optimizer holds of it, where there is one."""
    for name, optimizer, parameter in named_parameters(optimizers):
        state = optimizer.state.get(getattr(parameter, "owner", parameter))
        if isinstance(state, dict):
            yield name, parameter, state


def named_parameters(optimizers: Optimizers) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, optimizer and parameter; a name that another one's parameter has gets the optimizer's number."""
    taken: dict[str, int] = {}
    for optimizer in optimizers.all:
        for name, parameter in optimizers.parameters(optimizer).items():
            owner = id(getattr(parameter, "owner", parameter))
            is_free = taken.setdefault(name, owner) == owner
            yield name if is_free else f"optimizer {optimizer.samestep_number}: {name}", optimizer, parameter


def held_states(states: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the tensors and numbers of states, and of tensors that are cut over the ranks this rank's parts."""
    return {
        name: {key: value for key, value in state.items() if isinstance(value, int | float)}
        | held({key: value for key, value in state.items() if hasattr(value, "layout") or hasattr(value, "place")})
        for name, state in states.items()
    }


def norms_of(gradients: Mapping[str, Any]) -> dict[str, float]:
    """Returns the norms of gradients, without sparse ones; of what is cut over the ranks, of this rank's part."""
    import torch

    local = {name: _part_of(one) for name, one in gradients.items()}
    plain = {name: one for name, one in local.items() if type(one) is torch.Tensor and one.layout == torch.strided}
    return {name: float(one.norm()) for name, one in plain.items()}


def _part_of(gradient: Any) -> Any:
    """This rank's numbers of what may be cut; None of a sum over the ranks that has not been taken."""
    if hasattr(gradient, "placements"):
        if any(placement.is_partial() for placement in gradient.placements):
            return None
        local = gradient.to_local()
        return local.wait() if hasattr(local, "wait") else local  # a collective may be on its way
    return gradient.values if hasattr(gradient, "place") else gradient


def held(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors, by name, and of those that are cut over the ranks this rank's parts."""
    tensors = {name: one.data if hasattr(one, "owner") else one for name, one in tensors.items()}
    if not any(hasattr(tensor, "_local_tensor") for tensor in tensors.values()):
        return tensors
    from samestep.verification.recording import parts

    return dict(zip(tensors, parts.held(list(tensors.values())), strict=True))


def uncut(value: Any) -> Any:
    """Returns all numbers of what may be cut, in one process, which holds them: a tensor to read and to write."""
    data = value.data if hasattr(value, "layout") or hasattr(value, "owner") else value
    return getattr(value, "_local_tensor", data)


def _is_cut(parameter: Any) -> bool:
    return hasattr(parameter, "_local_tensor") or getattr(parameter, "is_cut", False)


def digests(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns name -> digest, or None where there is no tensor; that of a part begins with its place."""
    reported = held(tensors)
    if all(tensor is None or hasattr(tensor, "detach") for tensor in reported.values()):  # no parts, and no sums due
        return {name: None if tensor is None else digest(tensor) for name, tensor in reported.items()}
    from samestep.verification.recording.parts import digest_of

    return {name: None if tensor is None else digest_of(tensor) for name, tensor in reported.items()}
