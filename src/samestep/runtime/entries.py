"""What ranks sign in with at their store, read as if anybody could have written it: c10d asks nobody who they are."""

from __future__ import annotations

import json
from typing import Any

from samestep.errors import RendezvousError

__all__: list[str] = []

LONGEST = 1 << 16  # bytes of an entry; one is a few hundred


def entry_of(value: bytes, rank: int) -> dict[str, Any]:
    """Returns what a rank has signed in with. Whoever reaches the store can write there: nothing else is taken.

    Raises:
        RendezvousError: it is nothing that a rank writes.
    """
    try:
        entry = json.loads(value) if len(value) <= LONGEST else None
    except (ValueError, RecursionError):
        entry = None
    known = {"host": str, "pid": int, "size": int}
    if not isinstance(entry, dict) or any(type(entry.get(name)) is not kind for name, kind in known.items()):
        raise RendezvousError(
            f"what stands in the store for rank {rank} is no rank's entry ({len(value)} bytes): somebody else writes "
            "there, or its samestep is of another version"
        )
    return entry


def compare(signed: list[dict[str, Any]]) -> None:
    """Raises RendezvousError where ranks have joined with unlike versions, sizes or settings."""
    for name in ("size", "samestep", "torch", "pipeline", "backend", "device"):
        values = {json.dumps(entry.get(name)) for entry in signed}
        if len(values) > 1:
            told = "; ".join(f"rank {rank}: {entry.get(name)}" for rank, entry in enumerate(signed))
            raise RendezvousError(f"the ranks do not agree on {name}: {told}")
