"""Floor 2: how values of many ranks become one: in shared memory, or by messages."""

from __future__ import annotations

__all__: list[str] = []
