"""A hook on a script's module that stays with that module: no copy of it, and no file, has it.

A script may copy a model (an average of its weights) or save it whole. A hook of ours would go along, with all that it
refers to: pickle refuses that, and a copy would tell of itself what the script's own model does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__: list[str] = []


class Hook:
    """Calls a function; what becomes of it in a copy does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does what the function does."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and pickles, as one that does nothing."""
        return Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    pass
