"""The state of the objects that a script names, in one form however they are wrapped.

`DistributedDataParallel` puts `module.` before every name of a state dict and `torch.compile` puts `_orig_mod.`,
so a checkpoint saved with a wrapper does not load without it. Here names are those of the bare modules, on the way
in and on the way out. PyTorch also copies a float64 tensor into a float32 parameter, loads the state of one kind
of optimizer into another, and casts optimizer state to its parameter's type, each without a word; here the first
two are refused before anything is loaded, and the third is undone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import CheckpointError, UsageError
from samestep.running.checkpoints.differences import of_modules, of_shapes

__all__ = ["State", "Stateful", "check_names", "differences", "load", "shortened", "state_of"]

OPTIONS = ("every", "keep", "keep_each", "time_limit")  # of samestep.checkpoint, beside the objects that it is given
_LONGEST_LIST = 6


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> Any:
        """Returns the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes the state over."""


def check_names(named: dict[str, Any]) -> None:
    """Refuses what has no state.

    Raises:
        UsageError: an object lacks ``state_dict`` or ``load_state_dict``, or nothing was named.
    """
    if not named:
        raise UsageError("nothing to save: name at least one object, as in checkpoint(path, world, model=model)")
    for name, thing in named.items():
        if isinstance(thing, type) or not isinstance(thing, Stateful):
            kind = "None" if thing is None else type(thing).__name__
            meant = get_close_matches(name, OPTIONS, 1)
            asked = f"; is the option {meant[0]}= meant?" if meant else ""
            raise UsageError(f"{name}={kind} cannot be saved: it has no state_dict() and load_state_dict(){asked}")


@dataclass(frozen=True)
class State:
    """The state of one named object.

    Attributes:
        about: what tells whether it fits another object, as JSON: its kind, and for an optimizer the shapes of its
            parameters by group.
        content: its state dict, with the names of bare modules.
    """

    about: dict[str, Any]
    content: Any


def state_of(thing: Stateful) -> State:
    """Returns what a checkpoint keeps of ``thing``. Collective if the object's own ``state_dict`` is."""
    content = thing.state_dict()
    if isinstance(thing, nn.Module):
        names = _bare_names(thing, content)
        return State({"kind": "module"}, {names[key]: value for key, value in content.items()})
    if isinstance(thing, Optimizer):
        shapes = [[list(p.shape) for p in group["params"]] for group in thing.param_groups]
        return State({"kind": _class_name(thing), "shapes": shapes}, content)
    return State({"kind": _class_name(thing) if isinstance(thing, LRScheduler) else "object"}, content)


def differences(saved: dict[str, State], present: dict[str, State]) -> list[str]:
    """Returns what keeps the ``saved`` states from fitting the ``present`` ones, a line each; empty if they fit.

    Args:
        saved: name -> result of :func:`state_of`, as read.
        present: name -> result of :func:`state_of` of the objects that are to be loaded.
    """
    lines = [
        f"{name}: in the checkpoint, not named here; name it, as in checkpoint(…, {name}=…)"
        for name in saved
        if name not in present
    ]
    lines += [f"{name}: named here, not in the checkpoint" for name in present if name not in saved]
    for name, here in present.items():
        if name in saved:
            lines += [f"{name}{line}" for line in _differences_of_one(saved[name], here)]
    return lines


def shortened(lines: list[str]) -> str:
    """Returns the first few of ``lines`` and the count of the rest, one below the other."""
    rest = [f"and {len(lines) - _LONGEST_LIST} more"] if len(lines) > _LONGEST_LIST else []
    return "".join(f"\n  {line}" for line in lines[:_LONGEST_LIST] + rest)


def load(thing: Stateful, saved: State) -> None:
    """Lets ``thing`` take over what :func:`state_of` returned, in place and on its own device.

    Raises:
        CheckpointError: it is no state of such an optimizer.
    """
    state = saved.content
    if isinstance(thing, nn.Module):
        names = _bare_names(thing, thing.state_dict())
        thing.load_state_dict({key: state[bare] for key, bare in names.items()})
        return
    if not isinstance(thing, Optimizer):
        thing.load_state_dict(state)
        return
    try:
        thing.load_state_dict(state)
        _restore_types(thing, state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        told = f"the saved state of a {_class_name(thing)} cannot be loaded: {type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(told) from error


def _differences_of_one(saved: State, present: State) -> list[str]:
    was, now = saved.about, present.about
    if was["kind"] != now["kind"]:
        return [f": was a {was['kind']}, is a {now['kind']}"]
    if now["kind"] == "module":
        return list(of_modules(saved.content, present.content))
    if "shapes" in now:
        return [f": {line}" for line in of_shapes(was.get("shapes"), now["shapes"])]
    return []


def _bare_names(module: nn.Module, state: Iterable[str]) -> dict[str, str]:
    """Maps the keys of a module's state dict to the names they have without wrappers."""
    wrapped = [_uncompiled(name) for name, part in module.named_modules() if isinstance(part, DistributedDataParallel)]
    names = {}
    for key in state:
        bare = _uncompiled(key)
        for name in wrapped:
            inside = f"{name}.module." if name else "module."
            if bare.startswith(inside):
                bare = (f"{name}." if name else "") + bare.removeprefix(inside)
        names[key] = bare
    if len(set(names.values())) != len(names):
        raise CheckpointError(f"two entries of {type(module).__name__} have one name once wrappers are taken off")
    return names


def _uncompiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _restore_types(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Gives optimizer state the precision back that torch cast to the parameter's on loading."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _class_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
