"""Shards of data whose length is unknown: one stream that all ranks read, or a source of each rank's own.

torch's loaders end on each rank when its own data do, and the others wait. Here an epoch is over when it is over on all
ranks (see `step_pipeline`). Of one stream, positions and the ledger are those of any other dataset. Of a rank's own
source nothing is known but how much it gave; a rank that has no more takes part with empty batches.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from samestep.data.batches import tensors_of
from samestep.data.iterable import StreamLoader, step_of
from samestep.data.order import StepPartitioner
from samestep.data.shards import Shards
from samestep.data.step_pipeline import StepPart, Steps
from samestep.errors import DataError
from samestep.runtime.world import World


class _UnboundedShards(Shards, ABC):
    """Shards that do not know how many steps an epoch has."""

    @property
    def steps_per_epoch(self) -> int:
        """Not known.

        Raises:
            DataError: always.
        """
        raise DataError("how many steps an epoch has is not known: the data do not say how many they are")

    def __len__(self) -> int:
        raise TypeError("how many micro-batches an epoch has is not known: the data do not say how many they are")

    def _steps(self) -> Steps:
        for current, batches in self._pipeline.run_agreed(self._epoch, self._cursor, self._parts()):
            if self._partitioner.drop_last and current.step.size < self.batch_size:
                return
            yield current, batches

    @abstractmethod
    def _parts(self) -> Iterator[StepPart]:
        """Yields this rank's part of one step after another, loaded, from the cursor on."""


class UnknownLengthShards(_UnboundedShards):
    """Shards of one stream of unknown length, which all ranks read."""

    @property
    def step(self) -> int:
        return -(-self._reached // self.batch_size)

    def _parts(self) -> Iterator[StepPart]:
        assert isinstance(self._loader, StreamLoader)
        loaded = self._loader.load(self._epoch, self._partitioner, self._cursor)
        start = self._cursor
        for first in loaded:
            step = step_of(self._partitioner, start, first.items)
            batches = [first.batch, *(one.batch for one in islice(loaded, len(step.micro) - 1))]
            yield StepPart(batches, [high - low for low, high in step.micro], step)
            start = step.stop


class _OwnShards(_UnboundedShards):
    """Shards of a source of each rank's own, which counts steps: which items they hold is not known."""

    _finished = _committed = 0  # steps of this epoch

    @property
    def step(self) -> int:
        return self._finished

    def _go_to(self, epoch: int, cursor: int) -> None:
        super()._go_to(epoch, cursor)
        if cursor == 0:
            self._committed = 0
        self._finished = self._committed

    def finish_step(self) -> None:
        """Ends the step whose last micro-batch was yielded. Collective."""
        under_way = self._current is not None
        super().finish_step()
        self._finished += under_way

    def _consume(self) -> None:
        self._cursor, self._committed = self._reached, self._finished

    def _restart_epoch(self, epoch: int, saved_by: str) -> None:
        if self._world.is_first:
            sys.stderr.write(
                f"samestep: epoch {epoch} begins anew: the data split themselves, and were saved in mid-epoch by "
                f"{saved_by}; its samples come a second time\n"
            )


class SelfShardedShards(_OwnShards):
    """Shards of a dataset that gives each rank and worker its own part."""

    def __init__(
        self,
        loader: StreamLoader,
        partitioner: StepPartitioner,
        world: World,
        *,
        sizes: Sequence[int],
        seed: int,
        weigh: Any,
    ) -> None:
        super().__init__(
            loader, partitioner, world, seed=seed, shuffle=False, weigh=weigh, kind="own", own_micro=len(sizes)
        )
        self._sizes = [size for size in sizes if size]  # another rank may have a sample for each, this one fewer
        self._readers = [world.data.size, loader.settings.workers, partitioner.batch_size, len(sizes)]

    def _parts(self) -> Iterator[StepPart]:
        assert isinstance(self._loader, StreamLoader)
        loaded, consumed = self._loader.load_own(self._epoch, self._sizes), self._committed
        while taken := list(islice(loaded, len(self._sizes))):
            part = StepPart([one.batch for one in taken], [one.items for one in taken])
            if consumed:  # it is read again, and left
                self._pipeline.learn_empty(part)
                consumed -= 1
            else:
                yield part

    def state_dict(self) -> dict[str, Any]:
        """Returns how much was consumed, and by how many readers: plain data, the same on every rank."""
        return {"own": list(self._readers), "epoch": self.epoch, "cursor": self._cursor, "steps": self._committed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved run stood, or begins its epoch anew where other readers would find other items."""
        if "own" not in state:
            raise DataError("the saved run did not let the dataset split itself: its position means nothing here")
        epoch, cursor, steps = int(state["epoch"]), int(state["cursor"]), int(state["steps"])
        ranks, workers, *cut = state["own"]
        if [ranks, workers, *cut] != self._readers and cursor:
            size = f", in steps of {cut[0]}" if cut else ""
            self._restart_epoch(epoch, f"{ranks} ranks with {workers} workers each{size}")
            cursor = steps = 0
        self._committed = steps
        self._go_to(epoch, cursor)
        self._report.resume(state.get("loss"))


class StatefulLoaderShards(_OwnShards):
    """Shards of torchdata's StatefulDataLoader, one of each rank's own, whose state goes into the checkpoint.

    The loader is asked for its state after every step, since it is one step ahead of what was computed, and the answer
    is kept until the step is committed.

    Attributes:
        per_rank: the entry of the state that every rank has of its own; a checkpoint gathers them.
    """

    per_rank = "loader"

    def __init__(
        self, source: DataLoader[Any], partitioner: StepPartitioner, world: World, *, micro: int, seed: int, weigh: Any
    ) -> None:
        super().__init__(
            None, partitioner, world, seed=seed, shuffle=False, weigh=weigh, kind="stateful", own_micro=micro
        )
        self._source: Any = source
        self._micro = micro
        self._first: Any = None  # this rank's loader's state at the start of the epoch; None: not begun
        self._state: Any = None  # that at the committed position
        self._over = False  # it had nothing more to give then
        self._states: dict[int, Any] = {}  # after each step of this epoch that is not committed
        self._ended: Any = None  # behind the last

    def _parts(self) -> Iterator[StepPart]:
        self._states.clear()
        self._ended = self._state if self._over else None
        if self._over:  # loaded again, it might begin anew
            return
        if self._state is not None:
            self._source.load_state_dict(copy.deepcopy(self._state))
        number, batches = self._committed, iter(self._source)
        while taken := list(islice(batches, self._micro)):
            number += 1
            self._states[number] = copy.deepcopy(self._source.state_dict())
            yield StepPart(taken, [_count(batch) for batch in taken])
        self._ended = copy.deepcopy(self._source.state_dict())

    def _consume(self) -> None:
        super()._consume()
        self._state = self._states.get(self._committed, self._state)
        self._states = {number: state for number, state in self._states.items() if number > self._committed}
        if self._ended is not None and not self._states:
            self._state, self._over = self._ended, True

    def _go_to(self, epoch: int, cursor: int) -> None:
        if epoch != self._epoch:
            self._first = self._state = self._ended if self._over and epoch == self._epoch + 1 else None
            self._over = False
        elif cursor == 0 and self._cursor:
            self._state, self._over = self._first, False
        super()._go_to(epoch, cursor)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's position, its loader's own state included: plain data if that is."""
        empty = self._pipeline.empty if is_plain(self._pipeline.empty) else None  # a loader at its end shows no batch
        mine = {"loader": [self._state, self._over, empty], "ranks": self._world.data.size}
        return mine | {"epoch": self.epoch, "cursor": self._cursor, "steps": self._committed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the loader's own state; saved by another number of ranks, its epoch begins anew."""
        if "loader" not in state:
            raise DataError("the saved run did not read a stateful loader: its position means nothing here")
        epoch, cursor, steps = int(state["epoch"]), int(state["cursor"]), int(state["steps"])
        if state["ranks"] == self._world.data.size:
            self._state, self._over, self._pipeline.empty = state["loader"]
        else:
            self._restart_epoch(epoch, f"{state['ranks']} ranks")
            cursor, steps, self._state, self._over = 0, 0, None, False
        self._first = None if cursor else self._state
        self._epoch, self._cursor, self._committed = epoch, cursor, steps
        self._go_to(epoch, cursor)
        self._report.resume(state.get("loss"))


def micro_batches_of(loader: Any, batch_size: int, ranks: int) -> int:
    """Returns how many of a loader's batches make a step on each rank."""
    each = loader.batch_size
    if each is None:  # its batches are whatever its dataset gives
        return 1
    if batch_size % (each * ranks):
        raise DataError(
            f"batch_size {batch_size} is no multiple of what {ranks} ranks load at once, {each} each: batch_size is "
            f"global, so give a multiple of {each * ranks}, and the loader a batch_size that divides it"
        )
    count: int = batch_size // (each * ranks)
    return count


def is_plain(batch: Any) -> bool:
    """Whether a batch is made of what a checkpoint can hold."""
    if isinstance(batch, Mapping):
        return type(batch) is dict and all(map(is_plain, batch.values()))
    if isinstance(batch, list | tuple):
        return type(batch) in {list, tuple} and all(map(is_plain, batch))
    return batch is None or type(batch) in {torch.Tensor, bool, int, float, str}


def _count(batch: Any) -> int:
    tensors = tensors_of(batch)
    if tensors and tensors[0].dim():
        return int(tensors[0].shape[0])
    if isinstance(batch, Sequence) and batch:
        return len(batch)
    raise DataError(f"how many samples are in a {type(batch).__name__}? its first tensor must have one row for each")
