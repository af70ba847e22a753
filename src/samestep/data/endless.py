"""`shards` of data whose length nobody knows: one stream that all ranks read, or a stream of each rank's own.

torch's loaders end on each rank when its own data do, and the others wait. Here an epoch is over when it is over on all
ranks (see `lookahead`). Of one stream, positions and the ledger are those of any other dataset. Of a rank's own stream
nothing is known but how much it gave:

    rank 0   ├ 4 ┤ 4 ┤ 4 ┤ 1 ┤ 0 │          a step weighs what is really there;
    rank 1   ├ 4 ┤ 4 ┤ 3 ┤ 0 ┤ 0 │          the epoch ends for all when nothing is left on any
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from samestep.data.iterable import Kind
from samestep.data.iterable_loader import Portion, StreamLoader, step_of
from samestep.data.lookahead import LookAhead, Share
from samestep.data.order import Cut
from samestep.data.shards import Shards
from samestep.errors import DataError
from samestep.runtime.world import World

__all__: list[str] = []


class _Unbounded(Shards, ABC):
    """Shards that do not know how many steps an epoch has."""

    _look: LookAhead

    @property
    def steps_per_epoch(self) -> int:
        """Not known.

        Raises:
            DataError: always.
        """
        raise DataError("how many steps an epoch has is not known: the data do not say how many they are")

    def __len__(self) -> int:
        raise TypeError("how many micro-batches an epoch has is not known: the data do not say how many they are")

    def _run(self) -> Iterator[Any]:
        for current, batches in self._look.steps(self._shares(), self._cursor):
            if self._cut.drop_last and current.step.size < self.batch_size:
                return
            yield from self._micro_batches(current, batches)

    @abstractmethod
    def _shares(self) -> Iterator[Share]:
        """Yields this rank's share of one step after another, loaded, from the cursor on."""


class StreamShards(_Unbounded):
    """Shards of one stream of unknown length, which all ranks read."""

    def __init__(self, loader: StreamLoader, cut: Cut, world: World, *, seed: int, weigh: Any) -> None:
        super().__init__(loader, cut, world, seed=seed, shuffle=False, weigh=weigh, kind="repeats")
        self._stream = loader
        self._look = LookAhead(world, weigh=weigh, tagged=self._tag_weight)

    @property
    def step(self) -> int:
        """Steps of this epoch that are finished."""
        return -(-self._reached // self.batch_size)

    def _shares(self) -> Iterator[Share]:
        portions = self._stream.load_to_the_end(self._epoch, self._cut, self._cursor)
        start = self._cursor
        for first in portions:
            step = step_of(self._cut, start, first.size)
            rest = islice(portions, len(step.micro) - 1)
            yield Share([first.batch, *(one.batch for one in rest)], [high - low for low, high in step.micro], step)
            start = step.stop


class OwnShards(_Unbounded):
    """Shards of a dataset that gives each rank and worker its own part."""

    def __init__(
        self,
        loader: StreamLoader,
        cut: Cut,
        world: World,
        *,
        sizes: Sequence[int],
        seed: int,
        weigh: Any,
        kind: Kind = "own",
    ) -> None:
        super().__init__(loader, cut, world, seed=seed, shuffle=False, weigh=weigh, kind=kind)
        self._stream = loader
        self._sizes = sizes
        self._real = [size for size in sizes if size]  # another rank may have a sample for each, this one fewer
        self._readers = [world.data.size, loader.how.workers, cut.batch_size, len(sizes)]
        self._look = LookAhead(world, weigh=weigh, tagged=self._tag_weight, own=len(sizes))
        self._finished = 0  # steps of this epoch
        self._committed = 0

    @property
    def step(self) -> int:
        """Steps of this epoch that are finished."""
        return self._finished

    def _go_to(self, epoch: int, cursor: int) -> None:
        super()._go_to(epoch, cursor)
        if cursor == 0:
            self._committed = 0
        self._finished = self._committed

    def _shares(self) -> Iterator[Share]:
        shares = self._own_shares(self._stream.load_own(self._epoch, self._real))
        for consumed in islice(shares, self._committed):  # it is read again, and left
            self._look.learn(consumed)
        yield from shares

    def _own_shares(self, portions: Iterator[Portion]) -> Iterator[Share]:
        while taken := list(islice(portions, len(self._real))):
            yield Share([one.batch for one in taken], [one.size for one in taken])

    def finish_step(self) -> None:
        """Ends the step whose last micro-batch was yielded. Collective."""
        under_way = self._open is not None
        super().finish_step()
        self._finished += under_way

    def _consume(self) -> None:
        """Which items they were is not known, so no ledger is kept."""
        self._cursor, self._committed = self._reached, self._finished

    def state_dict(self) -> dict[str, Any]:
        """Returns how much was consumed, and by how many readers: plain data, the same on every rank."""
        return {"own": list(self._readers), "epoch": self.epoch, "cursor": self._cursor, "steps": self._committed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved run stood, or begins its epoch anew where other readers would find other items.

        Raises:
            DataError: the state is that of data which were split otherwise.
        """
        if "own" not in state:
            raise DataError("the saved run did not let the dataset split itself: its position means nothing here")
        epoch, cursor, steps = int(state["epoch"]), int(state["cursor"]), int(state["steps"])
        ranks, workers, *cut = state["own"]
        if [ranks, workers, *cut] != self._readers and cursor:
            size = f", in steps of {cut[0]}" if cut else ""
            begin_anew(self._world, epoch, f"{ranks} ranks with {workers} workers each{size}")
            cursor = steps = 0
        self._committed = steps
        self._go_to(epoch, cursor)
        self._report.resume(state.get("loss"))


def begin_anew(world: World, epoch: int, saved_by: str) -> None:
    """Says that an epoch that was under way is not gone on with."""
    if world.is_first:
        sys.stderr.write(
            f"samestep: epoch {epoch} begins anew: the data split themselves, and were saved in mid-epoch by "
            f"{saved_by}; its samples come a second time\n"
        )
