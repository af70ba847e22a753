"""`shards` of torchdata's StatefulDataLoader: a loader of each rank's own, whose state goes into the checkpoint.

The loader knows its own position, on its rank and for its workers; nobody else does. It is asked after every step,
since the rank is one step ahead of what it has computed, and the answer is kept until the step is committed:

    loaded       step 0 ── step 1 ── step 2
    state           s0        s1        s2
    computed               step 0 ── step 1      commit() of step 1 makes s1 the state to save, on every rank its own
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from samestep.data.batches import tensors_of
from samestep.data.endless import OwnShards, begin_anew
from samestep.data.iterable_loader import StreamLoader
from samestep.data.loader import Loading
from samestep.data.lookahead import Share
from samestep.data.order import Cut
from samestep.errors import DataError
from samestep.runtime.world import World

__all__: list[str] = []


class LoaderShards(OwnShards):
    """Shards of a stateful loader of each rank's own.

    Attributes:
        per_rank: the entry of the state that every rank has of its own; a checkpoint gathers them.
    """

    per_rank = "loader"

    def __init__(self, loader: DataLoader[Any], cut: Cut, world: World, *, micro: int, seed: int, weigh: Any) -> None:
        nothing = StreamLoader((), Loading(seeded=_no_generator))
        super().__init__(nothing, cut, world, sizes=[0] * micro, seed=seed, weigh=weigh, kind="stateful")
        self._source: Any = loader
        self._first: Any = None  # where this rank's loader stood at the start of the epoch; None: nowhere yet
        self._state: Any = None  # where it stood at the committed position
        self._over = False  # it had nothing more to give then
        self._states: dict[int, Any] = {}  # after each step of this epoch that is not committed
        self._ended: Any = None  # behind the last

    def _shares(self) -> Iterator[Share]:
        self._states.clear()
        self._ended = self._state if self._over else None
        if self._over:  # loaded again, it might begin anew
            return
        if self._state is not None:
            self._source.load_state_dict(copy.deepcopy(self._state))
        number, batches = self._committed, iter(self._source)
        while taken := list(islice(batches, len(self._sizes))):
            number += 1
            self._states[number] = copy.deepcopy(self._source.state_dict())
            yield Share(taken, [_count(batch) for batch in taken])
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
        """Returns where this rank stands, its loader's own state included: plain data if that is."""
        empty = self._look.empty if is_plain(self._look.empty) else None  # a loader at its end has nothing to show
        mine = {"loader": [self._state, self._over, empty], "ranks": self._world.data.size}
        return mine | {"epoch": self.epoch, "cursor": self._cursor, "steps": self._committed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the loader's own state; saved by another number of ranks, its epoch begins anew.

        Raises:
            DataError: the state is not that of a loader.
        """
        if "loader" not in state:
            raise DataError("the saved run did not read a stateful loader: its position means nothing here")
        epoch, cursor, steps = int(state["epoch"]), int(state["cursor"]), int(state["steps"])
        if state["ranks"] == self._world.data.size:
            self._state, self._over, self._look.empty = state["loader"]
        else:
            begin_anew(self._world, epoch, f"{state['ranks']} ranks")
            cursor, steps, self._state, self._over = 0, 0, None, False
        self._first = None if cursor else self._state
        self._epoch, self._cursor, self._committed = epoch, cursor, steps
        self._go_to(epoch, cursor)
        self._report.resume(state.get("loss"))


def micro_batches_of(loader: Any, batch_size: int, ranks: int) -> int:
    """Returns how many of a loader's batches make a step.

    Raises:
        DataError: they do not make one of `batch_size`.
    """
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


def _no_generator(_: int) -> Any:
    raise AssertionError("the loader is the user's")


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
