"""Floor 1: what messages between ranks cost, in plain numbers. Never imports torch."""

from __future__ import annotations

__all__: list[str] = []
