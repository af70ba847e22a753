"""Virtual ranks: a step cut into V slices that are computed alike on 1, 2, 4, … or V processes, to the last bit.

N ranks add their gradients in an order that depends on N, in batches whose shape does, with masks drawn from N
streams; so a run that goes on with fewer ranks is, in its last bits, another run. Here the number of slices belongs
to the run and not to the machine. Each has its own batch, its own random streams and its own buffers, and the
gradients of all are added by one tree:

    slice      0   1   2   3   4   5   6   7          virtual_ranks=8
    2 ranks    └── rank 0 ──┘   └── rank 1 ──┘         a rank computes its slices one after another, adds up its part
    4 ranks    └ 0 ─┘  └ 1 ─┘  └ 2 ─┘  └ 3 ─┘          of the tree, and the ranks add up the rest
    gradient   ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

What draws random numbers within a slice draws from the slice's streams; between the steps every rank draws from the
same ones, which go on as if there were no slices.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from samestep.errors import StepError, UsageError
from samestep.runtime import seeds
from samestep.seeding import derive_seed
from samestep.topology import is_power_of_two

__all__: list[str] = []


class Holder(Protocol):
    """Something that has a state for each slice: a replica's gradients and buffers."""

    def begin_slice(self, place: int) -> None:
        """The slice at this place among those held here begins."""

    def end_slice(self, place: int) -> None:
        """It is over."""


class VirtualRanks:
    """The slices that this rank computes, and which of them it is at.

    Args:
        count: slices of a step, over all ranks: a power of two.
        rank: this rank's position on the data axis.
        ranks: the length of the data axis, which must divide `count`.
        seed: of the run.
        device: the rank's.

    Attributes:
        held: slices computed here; they are `first` and those that follow it.
        place: of the slice under way, among those held here; None between steps.
    """

    def __init__(self, count: int, rank: int, ranks: int, *, seed: int, device: torch.device) -> None:
        if not is_power_of_two(count) or count % ranks:
            raise UsageError(
                f"virtual_ranks={count} on {ranks} ranks: it must be a power of two that the ranks divide evenly, such "
                f"as {max(4, 1 << (ranks - 1).bit_length())} on 1, 2 or 4 ranks"
            )
        self.count = count
        self.held = count // ranks
        self.first = rank * self.held
        self.place: int | None = None
        self._seed = seed
        self._device = device
        self._holders: list[weakref.ref[Any]] = []
        self._inside: dict[int, tuple[int, ...]] = {}  # by loader: where in its data it hands out this slice
        self._outside: seeds.RngState | None = None

    def hold(self, holder: Holder) -> None:
        """Tells a holder from now on which slice is under way."""
        self._holders.append(weakref.ref(holder))

    def enter(self, loader: int, place: int, *position: int) -> None:
        """A loader hands out a micro-batch of the slice at `place`; `position` is that of the step in its data.

        Raises:
            StepError: another loader is at another slice.
        """
        if self._inside.get(loader) == (place, *position):
            return  # the slice's next micro-batch
        if loader in self._inside or self.place is None:
            self._end()
            self._begin(place, loader, *position)
        elif place != self.place:
            raise StepError(
                f"one shards is at virtual rank {self.first + self.place}, another at {self.first + place}: iterate "
                "them side by side, `for a, b in zip(these, those)`, so that both are at the same slice of the step"
            )
        self._inside[loader] = (place, *position)

    def leave(self, loader: int) -> None:
        """A loader's step is over, or was abandoned."""
        if loader in self._inside:
            self._end()

    def _begin(self, place: int, *names: int) -> None:
        self._outside = seeds.RngState.taken(self._device)
        seeds.seed_device(derive_seed(self._seed, "slice", self.first + place, *names), self._device)
        self.place = place
        for holder in self._living():
            holder.begin_slice(place)

    def _end(self) -> None:
        place, self.place = self.place, None
        self._inside.clear()
        if place is None or self._outside is None:
            return
        for holder in self._living():
            holder.end_slice(place)
        self._outside.put_back()

    def _living(self) -> list[Any]:
        return [holder for reference in self._holders if (holder := reference()) is not None]
