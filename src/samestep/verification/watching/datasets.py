"""Where a script has made its datasets of torch's own kinds: TensorDataset, Subset (random_split), ConcatDataset.

What such a dataset holds was put into it on that line. A class of the user's own is looked for in its own code.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from samestep.launch.imports import when_imported
from samestep.launch.noting import call_site

__all__: list[str] = []

_made: dict[int, tuple[weakref.ref[Any], str]] = {}


def watch() -> None:
    """Notes the line of every one that is made from now on."""
    when_imported("torch.utils.data.dataset", _watch)


def _watch(module: Any) -> None:
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        original = super(module.Dataset, cls).__new__
        dataset = original(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        if cls.__module__.startswith("torch."):
            _made[id(dataset)] = weakref.ref(dataset), call_site(sys._getframe(1))  # noqa: SLF001
        return dataset

    module.Dataset.__new__ = __new__


def made_at(dataset: Any) -> str | None:
    """Returns "file:line" of where a dataset was made, None where it is none of torch's own."""
    reference, where = _made.get(id(dataset), (None, None))
    return where if reference is not None and reference() is dataset else None
