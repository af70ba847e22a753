"""What the parameters of an optimizer are called: by the models that are alive, whoever made and wrapped them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

__all__: list[str] = []

_WRAPPERS = ("module.", "_orig_mod.", "_forward_module.")


def roots() -> list[nn.Module]:
    """Returns the modules that no other module holds, in the order in which they were made."""
    # the type is asked, not the object: some that torch deprecates warn when they are looked at
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def names_of(parameters: Iterable[Tensor]) -> dict[int, str]:
    """Returns id -> name of the parameters that a model which is alive holds; names are those of the bare model."""
    wanted = {id(parameter) for parameter in parameters}
    names: dict[int, str] = {}
    for number, root in enumerate(found := [one for one in roots() if _holds(one, wanted)]):
        prefix = f"model {number + 1}: " if len(found) > 1 else ""
        for name, parameter in root.named_parameters():
            if id(parameter) in wanted:
                names.setdefault(id(parameter), prefix + bare(name))
    return names


def trained_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the trained parameters, by name, of the model that a module is, or is a part of."""
    for root in roots():
        if any(one is module for one in root.modules()):
            return {bare(name): one for name, one in root.named_parameters() if one.requires_grad}
    return {}


def bare(name: str) -> str:
    """Returns a name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def _holds(module: nn.Module, wanted: set[int]) -> bool:
    return any(id(parameter) in wanted for parameter in module.parameters())


def buffers_of(parameters: Iterable[Tensor], *, evaluating: bool = False) -> dict[str, Tensor]:
    """Returns the buffers of the models that hold any of the parameters, by name; or those of evaluating modules."""
    wanted = {id(parameter) for parameter in parameters}
    found: dict[str, Tensor] = {}
    for number, root in enumerate([one for one in roots() if _holds(one, wanted)]):
        prefix = f"model {number + 1}: " if number else ""
        found |= {prefix + bare(name): buffer for name, buffer in _persistent(root, evaluating=evaluating)}
    return found


def others_of(parameters: Iterable[Tensor], known: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns the trained parameters, by name, of the models that hold any of `parameters`, which are not `known`."""
    wanted, held = {id(parameter) for parameter in parameters}, {id(parameter) for parameter in known}
    found = [one for one in roots() if _holds(one, wanted)]
    return {
        (f"model {number + 1}: " if len(found) > 1 else "") + bare(name): parameter
        for number, root in enumerate(found)
        for name, parameter in root.named_parameters()
        if parameter.requires_grad and id(parameter) not in held
    }


def untrained_of(known: Iterable[Tensor]) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Yields the models that hold parameters which are not `known`, and these by name; with the buffers of an average.

    Between forward and backward a model under fully_shard holds whole parameters in place of its own; to read those
    makes their storage one that it cannot free any more.
    """
    held = {id(parameter) for parameter in known}
    for root in roots():
        is_sharded = any(one.__name__ == "FSDPModule" for module in root.modules() for one in type(module).__mro__)
        found: dict[str, Tensor] = {
            bare(name): one
            for name, one in root.named_parameters()
            if id(one) not in held and (not is_sharded or hasattr(one, "_local_tensor"))
        }
        if found and len(found) == len(list(root.parameters())):
            found |= dict(_persistent(root))
        if found:
            yield root, found


def foreign_buffers_of(parameters: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns the buffers of the modules that hold none of the parameters, by class and name."""
    wanted = {id(parameter) for parameter in parameters}
    others = [one for one in roots() if not _holds(one, wanted)]
    return {f"{type(one).__name__}: {name}": buffer for one in others for name, buffer in _persistent(one)}


def _persistent(root: nn.Module, *, evaluating: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to a model's state; the others are made anew."""
    for place, module in root.named_modules():
        if evaluating and module.training:
            continue
        for name, buffer in module.named_buffers(place, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:  # noqa: SLF001  (nowhere else told)
                yield name, buffer


def of_optimizer(optimizer: Any) -> list[Tensor]:
    """Returns an optimizer's parameters, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
