"""How findings are worded."""

from __future__ import annotations

from collections.abc import Sequence

__all__: list[str] = []

_MOST = 3


def listed(names: Sequence[str], what: str = "tensor") -> str:
    """Returns names in short.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more tensors'
    """
    shown = ", ".join(names[:_MOST])
    rest = len(names) - _MOST
    return shown if rest <= 0 else f"{shown} and {plural(rest, f'more {what}')}"


def plural(count: int, what: str) -> str:
    """Returns a count and its noun.

    >>> plural(1, "step"), plural(2, "batch")
    ('1 step', '2 batches')
    """
    if count == 1:
        return f"1 {what}"
    return f"{count} {what}es" if what.endswith(("tch", "s", "sh")) else f"{count} {what}s"


def numbers(values: Sequence[float]) -> str:
    """Returns "0.1, 0.05"."""
    return ", ".join(f"{value:g}" for value in values)
