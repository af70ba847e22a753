"""The modules of a process, remembered as they are made. Imports no torch.

To look for them among all objects takes 60 ms, and grows with what a script holds (measured); a recorded step asks for
them several times, and a checkpoint of one file for each tensor once for each.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from samestep.instrument.patch import call_site, is_own

__all__: list[str] = []

Lines = tuple[str, str]  # of the user's code: where a module was made, and where the model that it is a part of was

_made: list[list[tuple[weakref.ref[Any], Lines]]] = []  # one list, once modules are remembered


def remember(module: Any) -> None:
    """Remembers modules from now on, also those that are copied or read from a file.

    Args:
        module: torch.nn.modules.module.
    """
    made: list[tuple[weakref.ref[Any], Lines]] = []

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        original = super(module.Module, cls).__new__
        one = original(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        made.append((weakref.ref(one), _made_at(sys._getframe(1), module.Module)))  # noqa: SLF001
        return one

    module.Module.__new__ = staticmethod(__new__)  # torch calls it on an object too, to copy one with a weight norm
    _made.append(made)


def alive() -> list[Any] | None:
    """Returns those that are alive, in the order in which they were made; None where nobody remembers them."""
    if not _made:
        return None
    known = [(one, module) for one in _made[0] if (module := one[0]()) is not None]
    _made[0][:] = [one for one, _ in known]
    return [module for _, module in known if "_modules" in module.__dict__]  # another is under construction


def lines() -> dict[int, Lines]:
    """Returns id -> lines of the modules that are alive."""
    return {id(module): told for one, told in (_made[0] if _made else []) if (module := one()) is not None}


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
