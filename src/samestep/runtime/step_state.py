"""The state of a training step that all ranks share: whether it ends, and requests to save or to stop.

Clocks and signals differ between ranks. A rank that saved or stopped because of its own clock would leave the others
waiting in a collective. So a rank only makes a request; requests are sent with the report of each step, and all ranks
carry them out at the end of the same step, the one after (docs/step.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

REQUESTS = ("save", "stop")
_BASE = 1 << 20  # more than any number of ranks, so that counts of two requests do not overlap


@dataclass(frozen=True)
class StepLoss:
    """What a loader knows of the mean loss of a step, for code that computes it without `Shards.mean`."""

    total: float  # the weight of the step, over all ranks and micro-batches
    weigh: Callable[[Any], float]  # returns the weight of some samples of the micro-batch yielded last
    add: Callable[[Tensor], None]  # adds this replica's share of the mean
    weighted: bool = False  # the weight is the user's; else samples count


@dataclass
class StepState:
    # what all ranks do at the end of the last finished step, until it is done; equal on every rank
    agreed: frozenset[str] = frozenset()
    requests_enabled: bool = False  # whether requests are sent with the report of a step, which is then twice as long
    averaged: bool = False  # a backward has averaged gradients since the last step ended
    steps: int = 0  # how many steps have ended or were abandoned
    # returns why the last micro-batch has so few samples, and what to do; None outside of steps
    small_batch_hint: Callable[[], str] | None = None
    # why some rank will have no sample in the last step, and how many this micro-batch has; None where none will
    empty_later: tuple[str, int] | None = None
    mean: StepLoss | None = None  # of the step whose micro-batch was yielded last; None outside of steps
    # called on every rank where a loop over a loader has come to its end
    epoch_ends: list[Callable[[], None]] = field(default_factory=list)
    _requests: deque[str] = field(default_factory=deque)  # a signal handler or another thread may add to it
    _open: dict[int, bool] = field(default_factory=dict)  # loaders in a step; whether its last micro-batch is out

    @property
    def step_ends(self) -> bool:
        """Whether this backward synchronises: unless every loader that is in a step is in the middle of it.

        Known before forward. True without shards. To synchronise once too often changes nothing, since the mean of
        equal gradients is that gradient; once too seldom, and the ranks diverge.
        """
        return not self._open or any(self._open.values())

    def enter(
        self,
        loader: int,
        *,
        ends: bool,
        small_batch_hint: Callable[[], str] | None = None,
        empty_later: tuple[str, int] | None = None,
        mean: StepLoss | None = None,
    ) -> None:
        """A loader yields a micro-batch, which ends its step or does not."""
        self._open[loader] = ends
        self.small_batch_hint, self.empty_later, self.mean = small_batch_hint, empty_later, mean

    def leave(self, loader: int) -> None:
        self.steps += self._open.pop(loader, None) is not None
        if not self._open:
            self.small_batch_hint = self.empty_later = self.mean = None

    def end_epoch(self) -> None:
        """A loop over a loader has come to the end of its epoch. Collective: as the loop is."""
        for callback in list(self.epoch_ends):
            callback()

    def enable_requests(self) -> None:
        """Sends requests from now on. Collective: all ranks must call it, at the same step."""
        self.requests_enabled = True

    def request(self, what: str) -> None:
        """Requests that all ranks "save" or "stop"; it is sent with the report of the step that ends next."""
        assert what in REQUESTS
        assert self.requests_enabled, "enable_requests() comes first, on every rank"
        self._requests.append(what)

    def encode_requests(self) -> float:
        """Returns the requests as a number to be summed over the ranks, and clears them."""
        requested = set()
        while self._requests:  # one by one: what comes meanwhile is taken too, or is left for the next step
            requested.add(self._requests.popleft())
        return float(sum(_BASE**kind for kind, name in enumerate(REQUESTS) if name in requested))

    def apply(self, summed: float) -> None:
        """Adds the requests of all ranks to `agreed`; the code that carries one out removes it."""
        digits = int(summed)
        self.agreed |= frozenset(name for kind, name in enumerate(REQUESTS) if digits // _BASE**kind % _BASE)
