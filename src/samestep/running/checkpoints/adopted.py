"""What other formats hold, as states of ours: names without wrappers, kinds that a resume can compare.

A file of `torch.save` says neither which optimizer a state belongs to nor which of its dictionaries is a model. What
can be told from the values is told; the class of an optimizer or a schedule has to come from whoever converts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.running.checkpoints.tree import MAPPINGS, decode

__all__: list[str] = []

OWN = "samestep"  # the entry that carries what other formats have no place for


def adopted(
    content: Mapping[str, Any], kinds: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any], list[str]]:
    """Returns what tells about each state, the states, and the names of what is none.

    Args:
        content: of a foreign file: states by name, or the state of one model.
        kinds: name -> class, of optimizers and schedules.

    Raises:
        CheckpointError: there is no state, or a kind cannot be.
    """
    if content and all(isinstance(value, Tensor) for value in content.values()):
        content = {"model": content}
    states = {str(name): value for name, value in content.items() if isinstance(value, Mapping)}
    left_out = [str(name) for name in content if str(name) not in states]
    if not states:
        raise CheckpointError("it holds no state: no dictionary of tensors, and none of dictionaries")
    if unknown := sorted(kinds.keys() - states.keys()):
        raise CheckpointError(f"--kind {unknown[0]}: it holds {', '.join(sorted(states))}")
    states = {name: _bare(value) if _is_module(value) else value for name, value in states.items()}
    states = {name: _numbered(value) if _is_optimizer(value) else value for name, value in states.items()}
    return {name: _about(name, value, kinds.get(name)) for name, value in states.items()}, states, left_out


def rebuilt(tree: Any, value: Any) -> Any:
    """Returns `value` with the structure and the plain data of `tree`: a tensor is all that is taken from it.

    Formats that flatten a state lose its empty parts and turn keys into texts.
    """
    if not _holds_tensors(tree):
        return decode(tree, {})
    if isinstance(tree, list):
        return [rebuilt(part, one) for part, one in zip(tree, value, strict=True)]
    ((kind, content),) = tree.items()
    if kind in {"tensor", "array"}:
        if not isinstance(value, Tensor):
            raise TypeError(kind)
        return value if kind == "tensor" else value.numpy()
    if kind == "tuple":
        return tuple(rebuilt(part, one) for part, one in zip(content, value, strict=True))
    pairs = content.items() if isinstance(content, dict) else content
    mapping = {name: made for made, name in MAPPINGS.items()}[kind]
    keys = [(decode(key, {}), part) for key, part in pairs]
    return mapping({key: rebuilt(part, value.get(key, value.get(str(key)))) for key, part in keys})


def _holds_tensors(tree: Any) -> bool:
    if isinstance(tree, list):
        return any(map(_holds_tensors, tree))
    if not isinstance(tree, dict):
        return False
    return any(key in {"tensor", "array"} or _holds_tensors(value) for key, value in tree.items())


def _is_module(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(key, str) and isinstance(one, Tensor) for key, one in value.items())


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    return value.keys() >= {"state", "param_groups"} and isinstance(value["state"], Mapping)


def _bare(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names without what DistributedDataParallel and torch.compile put before or between them."""
    names = {name: ".".join(part for part in name.split(".") if part != "_orig_mod") for name in state}
    while all(name.startswith("module.") for name in names.values()):
        names = {name: bare.removeprefix("module.") for name, bare in names.items()}
    if len(set(names.values())) != len(names):
        raise CheckpointError("two of its tensors have one name once wrappers are taken off")
    return {names[name]: value for name, value in state.items()}


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with whole numbers for its parameters again; flattened formats have texts there."""
    parts = {
        int(key) if isinstance(key, str) and key.isdecimal() else key: part for key, part in state["state"].items()
    }
    return {**state, "state": parts}


def _about(name: str, state: Mapping[Any, Any], kind: str | None) -> dict[str, Any]:
    if _is_module(state):
        return {"kind": "module"}
    if kind is None:
        return {"kind": "object"}
    about: dict[str, Any] = {"kind": _full_name(kind)}
    if _is_optimizer(state):
        about["shapes"] = [[_shape(name, state, number) for number in g["params"]] for g in state["param_groups"]]
    return about


def _full_name(kind: str) -> str:
    """The name under which a class of torch is saved; `torch.optim.AdamW` lives in `torch.optim.adamw`."""
    for room in (torch.optim, torch.optim.lr_scheduler):
        found = getattr(room, kind.rpartition(".")[2], None)
        if isinstance(found, type) and kind.startswith(("torch.optim", found.__name__)):
            return f"{found.__module__}.{found.__qualname__}"
    return kind


def _shape(name: str, state: Mapping[Any, Any], number: Any) -> list[int]:
    """The shape of a parameter, which is that of what the optimizer keeps for each of its values."""
    kept = [value for value in state["state"].get(number, {}).values() if isinstance(value, Tensor)]
    shapes = [list(value.shape) for value in kept if value.dim()] or [list(value.shape) for value in kept]
    if not shapes:
        raise CheckpointError(f"--kind {name}: the shape of its parameter {number} cannot be told from its state")
    return shapes[0]
