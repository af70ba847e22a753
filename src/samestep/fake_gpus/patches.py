"""Attributes of other modules that are replaced while fake GPUs are on, and put back afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """Remembers what it has replaced."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._actions: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces `owner.name`."""
        held = vars(owner) if isinstance(owner, type | ModuleType) else owner.__dict__
        self._before.append((owner, name, held.get(name, _ABSENT)))
        setattr(owner, name, value)

    def on_undo(self, action: Callable[[], object]) -> None:
        """Has something done when all is put back."""
        self._actions.append(action)

    def set_everywhere(self, owner: ModuleType, name: str, value: Any) -> None:
        """Replaces a function of torch in its module, and wherever another module of torch has imported it by name."""
        old = getattr(owner, name)
        self.set(owner, name, value)
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("torch") and module is not None and module is not owner:
                held = getattr(module, "__dict__", {})
                if held.get(name, _ABSENT) is old:
                    self.set(module, name, value)

    def undo(self) -> None:
        """Puts everything back, the latest first."""
        for owner, name, value in reversed(self._before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._before.clear()
        while self._actions:
            self._actions.pop()()
