"""Floor 6: what a training would take on other machines, predicted from what it takes here."""

from __future__ import annotations

__all__: list[str] = []
