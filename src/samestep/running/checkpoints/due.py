"""Whether a checkpoint is due at the step that ends, alike on every rank.

Steps are counted the same on all ranks. Time is not: only rank 0's clock counts, and it sends a request to the other
ranks with the report of every step (:mod:`samestep.data.current_step`); without such reports rank 0 is asked at every
commit.
"""

from __future__ import annotations

import time

from samestep.running.checkpoints.every import Every
from samestep.runtime.exchange import broadcast_json
from samestep.runtime.world import World

__all__: list[str] = []


class Due:
    """Tells when `every` of a checkpoint has come round; `reports` says whether there are data, which report steps."""

    def __init__(self, every: Every, world: World, *, reports: bool) -> None:
        self._every = every
        self._world = world
        self._reports = reports
        self._asked = False  # rank 0 has requested a save, and the request is on its way
        self.note_save()

    def request_if_late(self) -> None:
        """Requests a save on rank 0 where it is late; the request leaves with the report of the step that ends now."""
        if self._reports and self._world.is_first and not self._asked and self._is_late():
            self._world.step.request("save")
            self._asked = True

    def has_come(self, step: int) -> bool:
        """Whether all ranks save now: decided by a count they share, or by what rank 0 told them."""
        if self._every.steps is not None and step % self._every.steps == 0:
            return True
        if self._reports:
            return "save" in self._world.step.agreed
        return self._every.seconds is not None and bool(broadcast_json(self._world.everyone, self._is_late()))

    def begin_save(self) -> None:
        """Takes back what was agreed: it is being done."""
        self._world.step.agreed -= {"save"}
        self._asked = False

    def note_save(self) -> None:
        """Counts the time anew; after a save that failed too: a full disk is not tried again at every step."""
        self._saved_at = time.monotonic()

    def _is_late(self) -> bool:
        return self._every.seconds is not None and time.monotonic() - self._saved_at >= self._every.seconds
