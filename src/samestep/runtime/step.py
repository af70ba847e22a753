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

from dataclasses import dataclass, field

__all__: list[str] = []

WISHES = ("save", "stop")
_BASE = 1 << 20  # more than there are ranks: wishes of one kind do not run over into the next kind's digits


@dataclass
class StepState:
    """The state of the step that this rank is in.

    Attributes:
        step_ends: the micro-batch yielded last is the last of its step; known before its forward. True without
            shards, so that every backward synchronises.
        agreed: what all ranks do at the end of the last finished step; equal on every rank.
        listens: whether wishes travel; until somebody listens, a step's report is half as long.
    """

    step_ends: bool = True
    agreed: frozenset[str] = frozenset()
    listens: bool = False
    _wishes: set[str] = field(default_factory=set)

    def listen(self) -> None:
        """Lets wishes travel from now on. Collective: every rank must call it, at the same step."""
        self.listens = True

    def wish(self, what: str) -> None:
        """Asks all ranks to "save" or "stop"; the wish leaves with the report of the step that ends next."""
        assert what in WISHES
        assert self.listens, "listen() comes first, on every rank"
        self._wishes.add(what)

    def take_wishes(self) -> float:
        """Returns the wishes as a number to be summed over the ranks, and forgets them."""
        taken = float(sum(_BASE**kind for kind, wish in enumerate(WISHES) if wish in self._wishes))
        self._wishes.clear()
        return taken

    def settle(self, summed: float) -> None:
        """Publishes what all ranks' wishes add up to."""
        digits = int(summed)
        self.agreed = frozenset(wish for kind, wish in enumerate(WISHES) if digits // _BASE**kind % _BASE)
