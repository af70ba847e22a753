"""What all ranks agree on, step by step: is this the micro-batch that ends the step, save now, stop now.

Clocks and signals differ between ranks. A rank that saved, or stopped, because *its* clock said so would leave the
others waiting in a collective. So a rank only wishes; the wishes ride on one small reduction a step, issued in the
same order everywhere, and all ranks act on its result at the end of the same step:

                step k                       step k + 1
    rank 0      wish "save"  ┤ end: report ──────────────────┤ end: agreed = {"save"}  → all save after step k + 1
    rank 1           ─       ┤ end: report ── beside the     ┤ end: agreed = {"save"}
    rank 2           ─       ┤ end: report ── computation    ┤ end: agreed = {"save"}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__: list[str] = []

WISHES = ("save", "stop")
_BASE = 1 << 20  # more than there are ranks: wishes of one kind do not run over into the next kind's digits


@dataclass(frozen=True)
class StepMean:
    """What a loader knows of the mean loss of a step, for who computes it otherwise than by `Shards.mean`.

    Attributes:
        total: the weight of the step, over all ranks and micro-batches.
        weigh: returns the weight of some samples of the micro-batch handed out last.
        add: takes this replica's share of the mean.
        weighted: the user said how; or else samples count.
    """

    total: float
    weigh: Callable[[Any], float]
    add: Callable[[Tensor], None]
    weighted: bool = False


@dataclass
class StepState:
    """The state of the step that this rank is in.

    Attributes:
        agreed: what all ranks do at the end of the last finished step, until it is done; equal on every rank.
        listens: whether wishes travel; until somebody listens, a step's report is half as long.
        averaged: a backward has averaged gradients since a step ended last.
        steps: how many steps have ended or were abandoned.
        epoch_ends: called on every rank where a loop over a loader has come to its end.
        few: says why the micro-batch handed out last has so few samples, and what to do; None outside of steps.
        mean: of the step whose micro-batch was handed out last; None outside of steps.
    """

    agreed: frozenset[str] = frozenset()
    listens: bool = False
    _wishes: deque[str] = field(default_factory=deque)  # a signal, or another thread, may wish at any moment
    averaged: bool = False
    steps: int = 0
    few: Callable[[], str] | None = None
    mean: StepMean | None = None
    epoch_ends: list[Callable[[], None]] = field(default_factory=list)
    _open: dict[int, bool] = field(default_factory=dict)  # loaders in a step; whether its last micro-batch is out

    @property
    def step_ends(self) -> bool:
        """Whether this backward synchronises: unless every loader that is in a step is in the middle of it.

        Known before forward. True without shards. To synchronise once too often changes nothing, since the mean of
        equal gradients is that gradient; once too seldom, and the ranks part.
        """
        return not self._open or any(self._open.values())

    def enter(
        self, loader: int, *, ends: bool, few: Callable[[], str] | None = None, mean: StepMean | None = None
    ) -> None:
        """A loader hands out a micro-batch, which ends its step or does not."""
        self._open[loader] = ends
        self.few, self.mean = few, mean

    def leave(self, loader: int) -> None:
        """A loader's step is over, or was abandoned."""
        self.steps += self._open.pop(loader, None) is not None
        if not self._open:
            self.few = self.mean = None

    def end_epoch(self) -> None:
        """A loop over a loader has come to the end of its epoch. Collective: as the loop is."""
        for act in list(self.epoch_ends):
            act()

    def listen(self) -> None:
        """Lets wishes travel from now on. Collective: every rank must call it, at the same step."""
        self.listens = True

    def wish(self, what: str) -> None:
        """Asks all ranks to "save" or "stop"; the wish leaves with the report of the step that ends next."""
        assert what in WISHES
        assert self.listens, "listen() comes first, on every rank"
        self._wishes.append(what)

    def take_wishes(self) -> float:
        """Returns the wishes as a number to be summed over the ranks, and forgets them."""
        taken = set()
        while self._wishes:  # one by one: what comes meanwhile is taken too, or is left for the next step
            taken.add(self._wishes.popleft())
        return float(sum(_BASE**kind for kind, wish in enumerate(WISHES) if wish in taken))

    def settle(self, summed: float) -> None:
        """Adds what all ranks wished to what is agreed; whoever does it takes it off."""
        digits = int(summed)
        self.agreed |= frozenset(wish for kind, wish in enumerate(WISHES) if digits // _BASE**kind % _BASE)
