"""The state of the objects that a script names, in one form however they are wrapped; compared before it is loaded.

`DistributedDataParallel` puts `module.` before every name of a state dict and `torch.compile` puts `_orig_mod.`. Here
names are those of the bare modules, on the way in and on the way out. PyTorch also copies a float64 tensor into a
float32 parameter, loads the state of one kind of optimizer into another, and casts optimizer state to its parameter's
type, each without a word; here the first two are refused before anything is loaded, and the third is undone.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoints.encoder import pack, unpack
from samestep.errors import CheckpointError, UsageError
from samestep.runtime.exchange import all_gather_json, all_gather_tensors, run_on_all_ranks
from samestep.runtime.world import World

OPTIONS = ("every", "keep", "keep_each", "time_limit", "resume")  # of samestep.checkpoint, beside the objects
_MOST_LINES = 6
_MOST_NAMES = 4  # differences of a kind that are named one by one


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def check_names(named: dict[str, Any]) -> None:
    if not named:
        raise UsageError("nothing to save: name at least one object, as in checkpoint(path, world, model=model)")
    for name, thing in named.items():
        if isinstance(thing, type) or not isinstance(thing, Stateful):
            kind = "None" if thing is None else type(thing).__name__
            meant = get_close_matches(name, OPTIONS, 1)
            hint = f"; is the option {meant[0]}= meant?" if meant else ""
            raise UsageError(f"{name}={kind} cannot be saved: it has no state_dict() and load_state_dict(){hint}")


@dataclass(frozen=True)
class ObjectState:
    # whether it fits another object, as JSON: its kind, and of an optimizer the shapes of its parameters by group
    about: dict[str, Any]
    content: Any  # its state dict, with the names of bare modules


def capture_state(thing: Stateful) -> ObjectState:
    """Returns what a checkpoint keeps of ``thing``. Collective if the object's own ``state_dict`` is."""
    content = thing.state_dict()
    if isinstance(thing, nn.Module):
        names = _bare_names(thing, content)
        return ObjectState({"kind": "module"}, {names[key]: value for key, value in content.items()})
    if isinstance(thing, Optimizer):
        shapes = [[list(p.shape) for p in group["params"]] for group in thing.param_groups]
        return ObjectState({"kind": _class_name(thing), "shapes": shapes}, content)
    return ObjectState({"kind": _class_name(thing) if isinstance(thing, LRScheduler) else "object"}, content)


def restore_state(thing: Stateful, saved: ObjectState) -> None:
    """Lets ``thing`` take over what :func:`capture_state` returned, in place and on its own device."""
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
        text = f"the saved state of a {_class_name(thing)} cannot be loaded: {type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(text) from error


def _bare_names(module: nn.Module, state: Iterable[str]) -> dict[str, str]:
    """Maps the keys of a module's state dict to the names they have without wrappers.

    Which parts of a name are wrappers is known from the modules: a user's own submodule may be called "module".
    """
    wrapped = [uncompiled(name) for name, part in module.named_modules() if isinstance(part, DistributedDataParallel)]
    names = {}
    for key in state:
        bare = uncompiled(key)
        for name in wrapped:
            inside = f"{name}.module." if name else "module."
            if bare.startswith(inside):
                bare = (f"{name}." if name else "") + bare.removeprefix(inside)
        names[key] = bare
    if len(set(names.values())) != len(names):
        raise CheckpointError(f"two entries of {type(module).__name__} have one name once wrappers are taken off")
    return names


def uncompiled(name: str) -> str:
    """Returns a name without what torch.compile puts into it."""
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


# --- an entry that every rank has of its own, such as the position of a stateful loader -----------------------


def gather_per_rank(thing: Any, state: ObjectState, world: World) -> ObjectState:
    """Returns the state of `thing` with every rank's own entry (`per_rank`) in it. Collective where it has one."""
    key = getattr(thing, "per_rank", None)
    if key is None:
        return state
    tree, data = run_on_all_ranks(world.everyone, lambda: pack(state.content[key], key))
    every = {
        "trees": all_gather_json(world.everyone, tree),
        "tensors": all_gather_tensors(world.everyone, torch.frombuffer(bytearray(data), dtype=torch.uint8)),
    }
    return ObjectState({**state.about, "per_rank": key}, {**state.content, key: every})


def take_own(state: ObjectState, world: World) -> ObjectState:
    """Returns the state as this rank's object takes it: with its own entry, or None in a world of another size."""
    key = state.about.get("per_rank")
    if key is None:
        return state
    every, own = state.content[key], None
    if len(every["trees"]) == world.size:
        own = unpack(every["trees"][world.rank], bytes(every["tensors"][world.rank].tolist()))
    return replace(state, content={**state.content, key: own})


# --- what keeps a saved state from fitting, in few lines: what differs in the same way is told once -----------


def mismatches(saved: dict[str, ObjectState], present: dict[str, ObjectState]) -> list[str]:
    """Returns what keeps the ``saved`` states from fitting the ``present`` ones, both by name, a line each."""
    lines = [
        f"{name}: in the checkpoint, not named here; name it, as in checkpoint(…, {name}=…)"
        for name in saved
        if name not in present
    ]
    lines += [f"{name}: named here, not in the checkpoint" for name in present if name not in saved]
    for name, here in present.items():
        if name in saved:
            lines += [f"{name}{line}" for line in _mismatches_of_one(saved[name], here)]
    return lines


def first_lines(lines: list[str]) -> str:
    """Returns the first few of ``lines`` and the count of the rest, one below the other."""
    rest = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join(f"\n  {line}" for line in lines[:_MOST_LINES] + rest)


def _mismatches_of_one(saved: ObjectState, present: ObjectState) -> Iterator[str]:
    was, now = saved.about, present.about
    if was["kind"] != now["kind"]:
        yield f": was a {was['kind']}, is a {now['kind']}"
    elif now["kind"] == "module":
        yield from _of_modules(saved.content, present.content)
    elif "shapes" in now:
        yield from (f": {line}" for line in _of_shapes(was.get("shapes"), now["shapes"]))


def _of_modules(saved: Any, present: dict[str, Any]) -> Iterator[str]:
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        yield f": the checkpoint holds a {type(saved).__name__} for a module"
        return
    gone, fresh = sorted(saved.keys() - present.keys()), sorted(present.keys() - saved.keys())
    if (prefixes := _prefixes(gone, fresh)) is not None:
        yield _renamed(*prefixes, len(gone))
    else:
        yield from _named(gone, "in the checkpoint, not in the model")
        yield from _named(fresh, "in the model, not in the checkpoint")
    forms = {key: (_form(saved[key]), _form(present[key])) for key in sorted(saved.keys() & present.keys())}
    changed = [
        f".{key}: {was} in the checkpoint, {now} in the model" for key, (was, now) in forms.items() if was != now
    ]
    yield from changed if len(changed) <= _MOST_NAMES else changed[:1]
    if len(changed) > _MOST_NAMES:
        yield f": {len(changed) - 1} more tensors have another shape or type"


def _of_shapes(saved: Any, present: list[Any]) -> Iterator[str]:
    if not isinstance(saved, list) or not all(isinstance(group, list) for group in saved):
        yield "the checkpoint does not say which parameters it had"
        return
    was, now = [len(group) for group in saved], [len(group) for group in present]
    if was != now:
        yield f"groups of {was} parameters in the checkpoint, of {now} here"
        return
    changed = [
        f"parameter {j} of group {i} has shape {old_shape} in the checkpoint, {new_shape} here"
        for i, (old, new) in enumerate(zip(saved, present, strict=True))
        for j, (old_shape, new_shape) in enumerate(zip(old, new, strict=True))
        if old_shape != new_shape
    ]
    count = f"{len(changed)} of {sum(now)} parameters have another shape; " if len(changed) > 1 else ""
    yield from (f"{count}{line}" for line in changed[:1])


def _named(keys: Sequence[str], where: str) -> Iterable[str]:
    if len(keys) <= _MOST_NAMES:
        return [f".{key}: {where}" for key in keys]
    return [f": {len(keys)} tensors {where}: {', '.join(keys[:3])}, …"]


def _renamed(was: str, now: str, count: int) -> str:
    if was and now:
        return f": the names of {count} tensors begin with {was!r} in the checkpoint, with {now!r} in the model"
    if now:
        return f": the names of {count} tensors begin with {now!r} in the model, and do not in the checkpoint"
    return f": the names of {count} tensors begin with {was!r} in the checkpoint, and do not in the model"


def _prefixes(gone: Sequence[str], fresh: Sequence[str]) -> tuple[str, str] | None:
    """Returns how the names in the checkpoint and in the model begin, where that alone is what differs.

    >>> names = ["0.bias", "0.weight", "2.bias", "2.weight", "4.bias"]
    >>> _prefixes(names, [f"net.{name}" for name in names])
    ('', 'net.')
    """
    if len(gone) <= _MOST_NAMES or len(gone) != len(fresh):
        return None
    for was in _common_prefixes(gone):
        for now in _common_prefixes(fresh):
            if {now + key.removeprefix(was) for key in gone} == set(fresh):
                return was, now
    return None


def _common_prefixes(keys: Sequence[str]) -> list[str]:
    """What all keys begin with, up to a dot; the shortest first."""
    common = os.path.commonprefix(list(keys))  # noqa: RUF071  (letters are what it is to compare)
    return ["", *(common[: end + 1] for end, character in enumerate(common) if character == ".")]


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
