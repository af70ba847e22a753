"""Virtual ranks: a step cut into V slices that are computed alike on 1, 2, 4, … or V processes, to the last bit.

The number of slices belongs to the run and not to the machine. Each slice has its own batch, its own random streams
and its own buffers; a rank computes its slices one after another, and the gradients of all are added by one tree.
Between the steps every rank draws from the same streams, which go on as if there were no slices.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from samestep.errors import StepError, UsageError
from samestep.runtime import rng
from samestep.seeding import derive_seed
from samestep.topology import is_power_of_two


@dataclass(eq=False)
class VirtualRanks:
    """The slices that this rank computes, and which of them is under way."""

    count: int  # slices of a step, over all ranks: a power of two
    rank: int  # this rank's position on the data axis
    ranks: int  # the length of the data axis, which must divide `count`
    seed: int  # of the run
    device: torch.device
    current: int | None = None  # the slice under way, among those of this rank; None between steps
    _listeners: list[weakref.ref[Any]] = field(default_factory=list)
    _inside: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by loader: its slice, and where in its data
    _outside: rng.RngState | None = None

    def __post_init__(self) -> None:
        if not is_power_of_two(self.count) or self.count % self.ranks:
            raise UsageError(
                f"virtual_ranks={self.count} on {self.ranks} ranks: it must be a power of two that the ranks divide "
                f"evenly, such as {max(4, 1 << (self.ranks - 1).bit_length())} on 1, 2 or 4 ranks"
            )
        self.local_count = self.count // self.ranks  # slices computed here: `first` and those that follow it
        self.first = self.rank * self.local_count

    def add_listener(self, listener: Any) -> None:
        """Calls `begin_slice` and `end_slice` with the place among the slices of this rank, as long as it lives."""
        self._listeners.append(weakref.ref(listener))

    def enter(self, loader: int, place: int, *position: int) -> None:
        """A loader yields a micro-batch of the slice at `place`; `position` is that of the step in its data."""
        if self._inside.get(loader) == (place, *position):
            return  # the slice's next micro-batch
        if loader in self._inside or self.current is None:
            self._end()
            self._begin(place, loader, *position)
        elif place != self.current:
            raise StepError(
                f"one shards is at virtual rank {self.first + self.current}, another at {self.first + place}: iterate "
                "them side by side, `for a, b in zip(these, those)`, so that both are at the same slice of the step"
            )
        self._inside[loader] = (place, *position)

    def leave(self, loader: int) -> None:
        if loader in self._inside:
            self._end()

    def _begin(self, place: int, *names: int) -> None:
        self._outside = rng.RngState.capture(self.device)
        rng.seed_device(derive_seed(self.seed, "slice", self.first + place, *names), self.device)
        self.current = place
        for listener in self._living():
            listener.begin_slice(place)

    def _end(self) -> None:
        place, self.current = self.current, None
        self._inside.clear()
        if place is None or self._outside is None:
            return
        for listener in self._living():
            listener.end_slice(place)
        self._outside.restore()

    def _living(self) -> list[Any]:
        return [listener for reference in self._listeners if (listener := reference()) is not None]
