"""The modules that are alive, and what they call their parameters. Imports no torch.

Modules are remembered as they are made. To look for them among all objects takes 60 ms, and grows with what a script
holds (measured); a recorded step asks for them several times.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from samestep.instrument.patch import call_site, is_own

if TYPE_CHECKING:
    from torch import Tensor, nn

Lines = tuple[str, str]  # of the user's code: where a module was made, and where the model that it is a part of was

_WRAPPERS = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PARALLEL = {"DistributedDataParallel", "FullyShardedDataParallel"}
_made: list[list[tuple[weakref.ref[Any], Lines]]] = []  # one list, once modules are remembered


def remember(module: Any) -> None:
    """Remembers modules from now on, also those that are copied or read from a file."""
    made: list[tuple[weakref.ref[Any], Lines]] = []

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        original = super(module.Module, cls).__new__
        one = original(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        made.append((weakref.ref(one), _made_at(sys._getframe(1), module.Module)))  # noqa: SLF001
        return one

    module.Module.__new__ = staticmethod(__new__)  # torch calls it on an object too, to copy one with a weight norm
    _made.append(made)


def alive() -> list[Any] | None:
    """Returns those that are alive, in the order in which they were made; None if :func:`remember` was not called."""
    if not _made:
        return None
    known = [(one, module) for one in _made[0] if (module := one[0]()) is not None]
    _made[0][:] = [one for one, _ in known]
    return [module for _, module in known if "_modules" in module.__dict__]  # another is under construction


def lines() -> dict[int, Lines]:
    """Returns id -> lines of the modules that are alive."""
    return {id(module): made_lines for one, made_lines in (_made[0] if _made else []) if (module := one()) is not None}


def _made_at(frame: FrameType, kind: type[Any]) -> Lines:
    line = whole = call_site(frame)
    outer: FrameType | None = frame
    while outer is not None:
        code = outer.f_code
        is_init = code.co_name == "__init__" and code.co_argcount > 0 and is_own(code.co_filename)
        if is_init and isinstance(outer.f_locals.get(code.co_varnames[0]), kind):
            whole = call_site(outer.f_back)
        outer = outer.f_back
    return line, whole


def roots() -> list[nn.Module]:
    """Returns the modules that no other module holds, in the order in which they were made."""
    modules = alive()
    if modules is None:
        from torch import nn

        # the type is asked, not the object: some that torch deprecates warn when they are looked at
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def batch_norms() -> list[list[nn.Module]]:
    """Returns the BatchNorm of each model, synchronised or not, in the order in which it holds them."""
    return [[one for one in root.modules() if "BatchNorm" in type(one).__name__] for root in roots()]


def parameters_of(root: nn.Module) -> list[Tensor]:
    """Returns a model's parameters; none of one that is still being made, and whose own code cannot tell them yet."""
    try:
        return list(root.parameters())
    except AttributeError:
        return []


def made_at(parameters: Iterable[Any]) -> list[Lines]:
    """Returns the lines that made the module of each parameter, and the model that it is a part of."""
    made, nowhere = lines(), ("", "")
    known = {
        id(parameter): made.get(id(module), nowhere)
        for root in roots()
        for module in root.modules()
        for parameter in module._parameters.values()  # noqa: SLF001  (those of a model under construction, too)
    }
    return [known.get(owner_of(one), nowhere) for one in parameters]


def trained_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the trained parameters, by name, of the model that a module is, or is a part of."""
    for root in roots():
        if any(one is module for one in root.modules()):
            return {bare(name): one for name, one in root.named_parameters() if one.requires_grad}
    return {}


def held_by(parameters: Iterable[Tensor]) -> dict[int, dict[str, Any]]:
    """Returns id -> name -> parameter: itself, or the slices of models in FullyShardedDataParallel that it holds."""
    wanted = {id(parameter) for parameter in parameters}
    held: dict[int, dict[str, Any]] = {}
    for prefix, root in _holders(wanted):
        of_root: dict[int, dict[str, Any]] = {}
        for name, one in named(root):
            of_root.setdefault(owner_of(one), {})[prefix + name] = one
        held = {key: theirs for key, theirs in of_root.items() if key in wanted} | held
    return held


def owner_of(parameter: Any) -> int:
    """Returns the id of what an optimizer holds of a parameter."""
    return id(getattr(parameter, "owner", parameter))


def named(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the parameters of a model, by its bare names; those in FullyShardedDataParallel as slices.

    While such a model runs, or has gathered its parameters, others stand in their place, which are left out.
    """
    if "torch.distributed.fsdp.fully_sharded_data_parallel" not in sys.modules:
        yield from ((bare(name), parameter) for name, parameter in root.named_parameters())
        return
    from samestep.verification.recording.flat import slices

    cut = {bare(one.name): one for one in slices(root)}
    owners = {id(one.owner) for one in cut.values()}
    yield from cut.items()
    for name, parameter in root.named_parameters():
        if id(parameter) not in owners and bare(name) not in cut:
            yield bare(name), parameter


def bare(name: str) -> str:
    """Returns a name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def _held_of(root: nn.Module, wanted: set[int]) -> set[int]:
    return {owner_of(one) for _, one in named(root)} & wanted


def _holding(wanted: set[int]) -> list[nn.Module]:
    """The models that hold any of the parameters.

    What holds a part of a wrapped model beside its wrapper is left out, such as an average of the weights, with the
    model that it follows, which one rank alone may keep.
    """
    held = [(root, _held_of(root, wanted)) for root in roots()]
    wrapped = set().union(*(theirs for root, theirs in held if type(root).__name__ in _PARALLEL))
    return [
        root for root, theirs in held if theirs and (type(root).__name__ in _PARALLEL or not theirs.issubset(wrapped))
    ]


def _holders(wanted: set[int]) -> list[tuple[str, nn.Module]]:
    """These models, and what their names begin with where there are several."""
    found = _holding(wanted)
    return [(f"model {number}: " if len(found) > 1 else "", root) for number, root in enumerate(found, 1)]


def buffers_of(parameters: Iterable[Tensor], *, evaluating: bool = False) -> dict[str, Tensor]:
    """Returns the buffers of the models that hold any of the parameters, by name; or those of evaluating modules."""
    wanted = {id(parameter) for parameter in parameters}
    found: dict[str, Tensor] = {}
    for number, root in enumerate(_holding(wanted)):
        prefix = f"model {number + 1}: " if number else ""
        found |= {prefix + bare(name): buffer for name, buffer in _persistent(root, evaluating=evaluating)}
    return found


def others_of(parameters: Iterable[Tensor], known: Iterable[Tensor]) -> dict[str, Any]:
    """Returns the trained parameters, by name, of the models that hold any of `parameters`, which are not `known`."""
    wanted, held = {id(parameter) for parameter in parameters}, {id(parameter) for parameter in known}
    return {
        prefix + name: parameter
        for prefix, root in _holders(wanted)
        for name, parameter in named(root)
        if parameter.requires_grad and owner_of(parameter) not in held
    }


def untrained_of(known: Iterable[Tensor]) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yields the models that hold parameters which are not `known`, and these by name; with the buffers of an average.

    Between forward and backward a model under fully_shard holds whole parameters in place of its own; to read those
    makes their storage one that it cannot free any more.
    """
    held = {id(parameter) for parameter in known}
    for root in roots():
        is_sharded = any(one.__name__ == "FSDPModule" for module in root.modules() for one in type(module).__mro__)
        found: dict[str, Any] = {
            name: one
            for name, one in named(root)
            if owner_of(one) not in held and (not is_sharded or hasattr(one, "_local_tensor"))
        }
        if found and len(found) == len(dict(named(root))):
            found |= dict(_persistent(root))
        if found:
            yield root, found


def foreign_buffers_of(parameters: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns the buffers of the modules that hold none of the parameters, by class and name."""
    wanted = {id(parameter) for parameter in parameters}
    others = [one for one in roots() if not _held_of(one, wanted)]
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
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
