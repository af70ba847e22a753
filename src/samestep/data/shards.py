"""One global order of samples, this rank's part of every step, and the loss that adds up to the whole's.

The batch size is global, a step is a slice of one order, and `mean` divides by the weight W of the *whole* step, over
all ranks and micro-batches, so that the gradients which DistributedDataParallel averages over N ranks are those of one
process: rank r's value is l_r = 1/W Σ its losses, and its gradient N · ∂l_r, because DDP divides the sum by N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from samestep import progress
from samestep.data.batches import tensors_of
from samestep.data.costs import BucketedOrder, Buckets, CostBalancedOrder, Costs, check_position
from samestep.data.current_step import CurrentStep, StepReport
from samestep.data.iterable import PROMISES, Kind, StreamLoader
from samestep.data.ledger import Ledger, with_positions
from samestep.data.loader import Loader
from samestep.data.order import ORDER_VERSION, UNKNOWN, Order, SampleOrder, StepPartitioner
from samestep.data.step_pipeline import SkipLog, StepPipeline, Steps
from samestep.errors import DataError, StepError
from samestep.runtime.scalar_sums import StepTag
from samestep.runtime.step_state import StepLoss
from samestep.runtime.world import World
from samestep.seeding import derive_seed
from samestep.text import plural

__all__ = ["Shards"]


class Shards:
    """This rank's part of a dataset, step by step. Made by :func:`samestep.shards`.

    Iterating yields one micro-batch at a time, from the last committed position to the end of the epoch. The epoch
    advances when it is exhausted; breaking out of the loop and iterating again starts at the committed position.

    Attributes:
        batch_size: samples of a step, over all ranks.
        epoch: epochs finished; may be set, to start that epoch anew.
        step: steps of this epoch that are finished.
        step_ends: the micro-batch yielded last is the last of its step; known before its forward.
    """

    def __init__(
        self,
        loader: Loader | StreamLoader | None,
        partitioner: StepPartitioner,
        world: World,
        *,
        seed: int,
        shuffle: bool,
        weigh: Any,
        costs: Costs | None = None,
        buckets: Buckets | None = None,
        kind: Kind = "indexed",
        own_micro: int | None = None,
    ) -> None:
        self.batch_size = partitioner.batch_size
        self.step_ends = True
        self._loader = loader
        self._partitioner = partitioner
        self._world = world
        self._seed = seed
        self._shuffle = shuffle
        self._number = world.next_id()
        self._kind = kind
        self._weigh = weigh
        self._costs = costs
        self._buckets = buckets
        by, micro = "" if costs is None else costs.digest, partitioner.micro_batch_size or 0
        self._digest = derive_seed(seed, partitioner.total, self.batch_size, micro, int(shuffle), by)
        self._epoch = 0
        self._cursor = 0  # everything before it is consumed: the step that used it was committed
        self._reached = 0  # everything before it was in a finished step
        self._order = self._order_of(0)
        self._balanced: CostBalancedOrder | None = None  # the same samples in the same steps, each sorted by cost
        self._ledger = Ledger()
        self._skips = SkipLog(world) if loader is not None and loader.skip else None
        weight_tag, is_bounded = partial(self._tag, "weight"), partitioner.total < UNKNOWN
        self._pipeline = StepPipeline(
            world, self.batch_size, weigh, weight_tag, self._skips, is_bounded=is_bounded, own_micro=own_micro
        )
        self._current: CurrentStep | None = None
        self._iteration = 0
        self._report = StepReport(world)

    @property
    def promise(self) -> str:
        """What can be promised of these data, in a sentence; less where they have no length or no random access."""
        return PROMISES[self._kind]

    @property
    def epoch(self) -> int:
        """Epochs finished. Setting it starts that epoch anew."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._go_to(epoch, 0)
        if self._ledger.is_empty:
            self._ledger = Ledger(begins=(epoch, 0))

    def _go_to(self, epoch: int, cursor: int) -> None:
        """Abandons a step under way, and any loop."""
        self._epoch, self._cursor, self._reached = epoch, cursor, cursor
        if self._order.epoch != epoch:
            self._order = self._order_of(epoch)
        if self._skips is not None:
            self._skips.discard()
        self._current = None
        self._iteration += 1
        self._report.discard()

    def _order_of(self, epoch: int) -> Order:
        order = SampleOrder(self._partitioner.total, self._seed, epoch, self._shuffle)
        return order if self._buckets is None else BucketedOrder(order, self._buckets)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self._partitioner.steps_from(0)

    @property
    def step(self) -> int:
        """Steps of this epoch that are finished."""
        return self.steps_per_epoch - self._partitioner.steps_from(self._reached)

    @property
    def loss(self) -> float:
        """The loss of the last finished step, over all ranks; nan before the first, or if `mean` was not used.

        After a resume it is that of the last step before the checkpoint, until another is finished.

        All ranks reduced it when the step ended, so reading it only waits, and one rank may read it alone.
        """
        return self._report.read()

    def __len__(self) -> int:
        """The micro-batches of a whole epoch on this rank, the same on every rank."""
        whole, rest = divmod(self._partitioner.end, self.batch_size)
        count = whole * len(self._partitioner.step(0).micro) if whole else 0
        return count + (len(self._partitioner.step(whole * self.batch_size).micro) if rest else 0)

    # --- the loop --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._world.check_open()
        self._go_to(self._epoch, self._cursor)
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Any]:
        progress.set_phase("data")
        for current, batches in self._steps():
            for batch in self._micro_batches(current, batches):
                if iteration != self._iteration:
                    raise StepError(
                        "these shards are being iterated elsewhere: a second loop began and this one went on"
                    )
                progress.set_phase("train")
                yield batch
                progress.set_phase("data")
        progress.set_phase("train")
        self._consume()
        self._go_to(self._epoch + 1, 0)
        self._world.step.end_epoch()

    def _steps(self) -> Steps:
        how, order = self._partitioner, self._order
        if self._costs is None:
            self._balanced = None
        else:
            order = self._balanced = CostBalancedOrder(self._order, how, self._costs, self._cursor)

        def steps() -> Iterator[Any]:
            return map((self._balanced or how).step, range(self._cursor, how.end, self.batch_size))

        if isinstance(self._loader, StreamLoader):
            host = self._loader.load(self._epoch, how, self._cursor)
        else:
            assert self._loader is not None
            host = self._loader.load(order, steps())
        return self._pipeline.run(self._epoch, self._cursor, steps(), host)

    def _micro_batches(self, current: CurrentStep, batches: Iterator[Any]) -> Iterator[Any]:
        self._current = current
        try:
            samples = sum(current.counts)
            weight = samples if current.weights is None else sum(current.weights)
            progress.add_work({"samples": samples, "weight": weight, "epoch": self._epoch})  # of this rank
            for number, batch in enumerate(batches):
                current.micro = number
                self.step_ends = current.step_ends
                self._world.step.enter(
                    self._number,
                    ends=self.step_ends,
                    small_batch_hint=partial(self._small_batch_hint, current),
                    empty_later=self._empty_later(current),
                    mean=self._mean_of(current),
                )
                if self._world.virtual is not None:
                    self._world.virtual.enter(self._number, current.local_slice, self._epoch, current.step.start)
                yield batch
                # another step is open, or none though this one is not over
                if self._current is not current if self._current is not None else not self.step_ends:
                    raise StepError("these shards were iterated elsewhere, or set to another position, in mid-step")
            self.finish_step()
        finally:
            self._leave()

    def _tag(self, purpose: str, position: int) -> StepTag:
        by = 0 if self._balanced is None else self._balanced.digest(position)
        return StepTag(purpose, self._number, self._epoch, position, self._digest ^ by)

    def _mean_of(self, step: CurrentStep) -> StepLoss:
        def weigh(samples: Any) -> float:
            if step.is_empty:
                return 0.0
            return float(len(tensors_of(samples)[0]) if self._weigh is None else self._weigh(samples))

        def add(share: torch.Tensor) -> None:
            self._report.add(share, step.local_slice)

        return StepLoss(step.weight, weigh, add, weighted=self._weigh is not None)

    def _empty_later(self, current: CurrentStep) -> tuple[str, int] | None:
        how = self._partitioner
        if not how.last_has_empty or current.step.size < self.batch_size:
            return None
        kind = "ranks" if self._world.virtual is None else "virtual ranks"
        last = f"the last step of an epoch has {plural(how.end % self.batch_size, 'sample')} for {how.ranks} {kind}"
        return last, current.counts[current.micro]

    def _small_batch_hint(self, current: CurrentStep) -> str:
        step, parts = current.step, self._partitioner.ranks
        kind = "ranks" if self._world.virtual is None else "virtual ranks"
        number = step.start // self.batch_size
        few = f"step {number} of epoch {self._epoch} has {step.size} samples for {parts} {kind}"
        if len(step.micro) > step.local_slices:
            most = self._partitioner.micro_batch_size
            return f"{few}, in micro-batches of at most {most}: take a larger micro_batch_size"
        if step.size == self.batch_size:
            return f"{few}: take a batch_size of at least {2 * parts}"
        return (
            f"{few}, the last and short one: samestep.shards(…, drop_last=True) leaves it out, or take a batch_size "
            f"that leaves none, or at least {2 * parts} samples"
        )

    # --- the end of a step -----------------------------------------------------------------------

    def finish_step(self) -> None:
        """Ends the step whose last micro-batch was yielded: the loss is reduced, and `world.step.agreed` refreshed.

        Called by `commit`, and when the next micro-batch is asked for; more than once does no harm. Collective.

        Raises:
            StepError: micro-batches of the step are still to come.
        """
        if self._current is None:
            return
        if not self.step_ends:
            raise StepError(
                f"the step is not over: micro-batch {self._current.micro + 1} of {len(self._current.step.micro)}; "
                "step, zero_grad and commit belong under `if batches.step_ends:`"
            )
        if self._skips is not None:
            self._skips.record(self._current.step, self._current.skipped)
        step, self._current = self._current.step, None
        self._reached = step.stop
        self._leave()
        self._report.send(self._tag("report", step.start))

    def _leave(self) -> None:
        self._world.step.leave(self._number)
        if self._world.virtual is not None:
            self._world.virtual.leave(self._number)

    def commit(self) -> None:
        """Counts the samples of the finished step as consumed: a resume goes on behind them. Collective."""
        self.finish_step()
        self._consume()

    def _consume(self) -> None:
        """Enters the finished steps into the ledger: those from the committed position on."""
        bucket = "" if self._buckets is None else self._buckets.name
        for start in range(self._cursor, self._reached, self.batch_size):
            stop = min(start + self.batch_size, self._reached)
            indices = self._order.take(start, stop)
            skipped = () if self._skips is None else with_positions(self._skips.take(start), start, indices)
            self._ledger.enter(self._epoch, start, indices, batch_size=self.batch_size, skipped=skipped, bucket=bucket)
        self._cursor = self._reached

    def mean(self, losses: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns this rank's share of the step's mean loss, to call `backward` on.

        The value is the local sum over the step's weight, so that the values of all ranks and micro-batches add up to
        the mean over the whole step; no communication. The gradient is that times the number of ranks, because
        DistributedDataParallel divides by it (on virtual ranks nobody does). A rank without samples gets a zero that
        backpropagates.

        Args:
            losses: one loss per item, not yet reduced (`reduction="none"`). Without `weight`, an item is a sample,
                shape [samples]; with it, whatever `weight` counted, any shape.
            mask: which losses count, same shape; true or 1 where one does. Needs a `weight` that counts the same.

        Returns:
            A scalar.

        Raises:
            StepError: the losses are reduced already, do not match the batch, or no micro-batch was yielded.

        Example:
            >>> import samestep, torch
            >>> data = torch.utils.data.TensorDataset(torch.ones(6, 2))
            >>> with samestep.world() as world:
            ...     batches = samestep.shards(data, world, batch_size=6)
            ...     for (x,) in batches:
            ...         print(batches.mean(x.sum(dim=1)))
            tensor(2.)
        """
        if self._current is None:
            raise StepError("mean() belongs inside the loop over the shards: no micro-batch is being processed")
        value = self._current.loss_share(losses, mask)
        self._report.add(value, self._current.local_slice)
        ranks = self._world.data.size
        if ranks > 1 and self._world.virtual is None and value.requires_grad:
            value.register_hook(lambda gradient: gradient * ranks)  # type: ignore[no-untyped-call]
        return value

    # --- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the committed position and the ledger: plain data, the same on every rank and world size.

        `samestep.data.audit` says from it alone whether every sample was consumed once.
        """
        more: dict[str, Any] = {} if self._buckets is None else {"bucket": self._buckets.state()}
        if self._kind != "indexed":
            more["stream"] = self._kind
        return more | {
            "order": ORDER_VERSION,
            "samples": None if self._partitioner.total == UNKNOWN else self._partitioner.total,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._partitioner.drop_last,
            "epoch": self.epoch,
            "cursor": self._cursor,
            "ledger": self._ledger.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the saved run stood; where it kept no ledger, one begins there.

        Raises:
            DataError: it was another dataset size, seed or order, so that "where" would mean nothing.
        """
        mine = self.state_dict()
        for name in ("order", "samples", "seed", "shuffle"):
            if (theirs := state.get(name, "of its own")) != mine[name]:
                raise DataError(
                    f"the saved run had {name} {theirs}, this one has {mine[name]}: its position in the data "
                    "means nothing here"
                )
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        check_position(cursor, state.get("bucket"), self._buckets)
        ledger = Ledger.of(state["ledger"]) if "ledger" in state else Ledger(begins=(epoch, cursor))
        self._go_to(epoch, cursor)
        self._report.resume(state.get("loss"))
        self._ledger = ledger
