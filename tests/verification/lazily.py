"""What takes long to make, made when a test first asks for it: no fixture runs everything before the first test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Lazily(dict[str, T]):
    """A dictionary whose values are made by their names."""

    def __init__(self, make: Callable[[str], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> T:
        self[name] = self._make(name)
        return self[name]
