"""The base class of listeners to the progress of a process; :mod:`samestep.progress` calls them."""

from __future__ import annotations

from collections.abc import Mapping

__all__: list[str] = []


class ProgressListener:
    """Base class of progress listeners. Methods that are not overridden do nothing."""

    def resume_from(self, step: int) -> None:
        """Called once: `step` steps were finished before this process began."""

    def set_step(self, step: int) -> None:
        """Called when `step` steps are finished."""

    def set_phase(self, name: str) -> None:
        """Called when the process enters phase `name`."""

    def enter_collective(self, operation: str, site: str, *, direct: bool) -> None:
        """Called before a collective; `direct` where the script's own line calls it, not a function called there."""

    def exit_collective(self) -> None:
        """Called after the collective."""

    def gradients_ready(self) -> None:
        """Called when this rank's own part of a backward pass is done."""

    def backward_done(self) -> None:
        """Called when a backward pass has ended."""

    def bucket_filled(self, number: int, size: int, *, begun: bool) -> None:
        """Called when a gradient bucket of `size` bytes is filled; `begun` if its reduction has started."""

    def bucket_reduced(self, number: int) -> None:
        """Called when the bucket holds the mean."""

    def add_work(self, work: Mapping[str, float]) -> None:
        """Called with this rank's work in the step or micro-batch: samples, weight, elements, epoch."""

    def log_values(self, values: Mapping[str, float | str]) -> None:
        """Called with the values that the script logs for the step finished last."""
