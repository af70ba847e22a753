"""The modules of a process, remembered as they are made. Imports no torch.

To look for them among all objects takes 60 ms, and grows with what a script holds (measured); a recorded step asks for
them several times, and a checkpoint of one file for each tensor once for each.
"""

from __future__ import annotations

import weakref
from typing import Any

__all__: list[str] = []

_made: list[list[weakref.ref[Any]]] = []  # one list, once modules are remembered


def remember(module: Any) -> None:
    """Remembers modules from now on, also those that are copied or read from a file.

    Args:
        module: torch.nn.modules.module.
    """
    made: list[weakref.ref[Any]] = []

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        original = super(module.Module, cls).__new__
        one = original(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        made.append(weakref.ref(one))
        return one

    module.Module.__new__ = __new__
    _made.append(made)


def alive() -> list[Any] | None:
    """Returns those that are alive, in the order in which they were made; None where nobody remembers them."""
    if not _made:
        return None
    known = [(one, module) for one in _made[0] if (module := one()) is not None]
    _made[0][:] = [one for one, _ in known]
    return [module for _, module in known if "_modules" in module.__dict__]  # another is under construction
