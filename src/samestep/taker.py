"""Who takes note of what a process does: its record in memory, the events of its run; told by `samestep.progress`."""

from __future__ import annotations

from collections.abc import Mapping

__all__: list[str] = []


class Taker:
    """Who takes note of what this process does; every method does nothing until it is overridden."""

    def begin_at(self, step: int) -> None:
        """`step` steps were finished before this process began."""

    def note_step(self, step: int) -> None:
        """`step` steps are finished."""

    def note_phase(self, name: str) -> None:
        """From now on the process is at `name`."""

    def enter(self, operation: str, site: str, *, direct: bool) -> None:
        """It takes part in a collective; `direct` where the script's own line calls it, not what that line calls."""

    def leave(self) -> None:
        """It has come back from it."""

    def note_ready(self) -> None:
        """It has done its own part of a backward pass."""

    def note_backward(self) -> None:
        """A backward pass has ended."""

    def note_bucket(self, number: int, size: int, *, begun: bool) -> None:
        """A gradient bucket of `size` bytes is filled, and, if `begun`, on its way to the other ranks."""

    def note_bucket_done(self, number: int) -> None:
        """It holds the mean."""

    def note_work(self, work: Mapping[str, float]) -> None:
        """What this rank has of the step, or of a micro-batch: samples, weight, elements; and of which epoch."""

    def note_values(self, values: Mapping[str, float | str]) -> None:
        """What the script wants to be kept of the step that was finished last."""
