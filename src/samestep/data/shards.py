"""`shards`: one global order of samples, this rank's part of every step, and the loss that adds up to the whole's.

The usual recipe is DistributedSampler, a DataLoader with the batch size divided by hand, and a mean loss. It pads the
tail, it averages means of unequal batches, it synchronises in accumulation where it need not, and a resume repeats
data. Here the batch size is global; a step is a slice of one order; and `mean` divides by the weight of the *whole*
step, so that the gradients which DistributedDataParallel averages over N ranks are those of one process:

    loss of the step  L = 1/W Σ losses         W = weight of the whole step, over all ranks and micro-batches
    rank r's value    l_r = 1/W Σ its losses   so that the values add up to L                              [1]
    rank r's gradient N · ∂l_r                 because DDP divides the sum by N: 1/N Σ N ∂l_r = ∂L         [2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from samestep import progress
from samestep.data.feed import Feed
from samestep.data.ledger import Ledger
from samestep.data.loader import Loader, check_dataset
from samestep.data.open_step import OpenStep
from samestep.data.order import ORDER_VERSION, Cut, Order, Step
from samestep.data.report import StepReport
from samestep.data.streams import SampleStreams
from samestep.errors import DataError, StepError
from samestep.runtime import seeds
from samestep.runtime.sums import Tag
from samestep.runtime.world import World

__all__ = ["Shards", "shards"]


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

    def __init__(self, loader: Loader, cut: Cut, world: World, *, seed: int, shuffle: bool, weigh: Any) -> None:
        self.batch_size = cut.batch_size
        self.step_ends = True
        self._cut = cut
        self._world = world
        self._seed = seed
        self._shuffle = shuffle
        self._number = world.next_number()
        self._digest = seeds.derive_seed(seed, cut.total, cut.batch_size, cut.micro_batch_size or 0, int(shuffle))
        self._epoch = 0
        self._cursor = 0  # everything before it is consumed: the step that used it was committed
        self._reached = 0  # everything before it was in a finished step
        self._order = Order(cut.total, seed, 0, shuffle)
        self._ledger = Ledger()
        self._feed = Feed(loader, world, batch_size=cut.batch_size, weigh=weigh, tagged=self._tag_weight)
        self._skips = self._feed.skips
        self._open: OpenStep | None = None
        self._iteration = 0
        self._report = StepReport(world)

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
            self._order = Order(self._cut.total, self._seed, epoch, self._shuffle)
        if self._skips is not None:
            self._skips.discard()
        self._open = None
        self._iteration += 1
        self._report.discard()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self._cut.steps_from(0)

    @property
    def step(self) -> int:
        """Steps of this epoch that are finished."""
        return self.steps_per_epoch - self._cut.steps_from(self._reached)

    @property
    def loss(self) -> float:
        """The loss of the last finished step, over all ranks; nan before the first, or if `mean` was not used.

        All ranks reduced it when the step ended, so reading it only waits, and one rank may read it alone.
        """
        return self._report.read()

    def __len__(self) -> int:
        """The micro-batches of a whole epoch on this rank, the same on every rank."""
        whole, rest = divmod(self._cut.end, self.batch_size)
        count = whole * len(self._cut.step(0).micro) if whole else 0
        return count + (len(self._cut.step(whole * self.batch_size).micro) if rest else 0)

    def __iter__(self) -> Iterator[Any]:
        self._world.check_open()
        self._go_to(self._epoch, self._cursor)
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Any]:
        steps = list(self._cut.steps(self._cursor))
        progress.note_phase("data")
        for batch in self._run(steps):
            if iteration != self._iteration:
                raise StepError("these shards are being iterated elsewhere: a second loop began and this one went on")
            progress.note_phase("train")
            yield batch
            progress.note_phase("data")
        progress.note_phase("train")
        self._consume()
        self._go_to(self._epoch + 1, 0)

    def _run(self, steps: list[Step]) -> Iterator[Any]:
        for current, batches in self._feed.steps(self._order, steps):
            yield from self._micro_batches(current, batches)

    def _tag(self, purpose: str, position: int) -> Tag:
        return Tag(purpose, self._number, self._epoch, position, self._digest)

    def _tag_weight(self, start: int) -> Tag:
        return self._tag("weight", start if start >= 0 else self._cut.end)

    def _micro_batches(self, current: OpenStep, batches: Iterator[Any]) -> Iterator[Any]:
        self._open = current
        try:
            for number, batch in enumerate(batches):
                current.micro = number
                self.step_ends = current.step_ends
                self._world.step.enter(self._number, ends=self.step_ends)
                if self._world.virtual is not None:
                    self._world.virtual.enter(self._number, current.place, self._epoch, current.step.start)
                yield batch
                if self._was_taken_over(current, over=self.step_ends):
                    raise StepError("these shards were iterated elsewhere, or set to another position, in mid-step")
            self.finish_step()
        finally:
            self._leave()

    def _was_taken_over(self, step: OpenStep, *, over: bool) -> bool:
        """Whether another step is open, or none though this one is not over."""
        return self._open is not step if self._open is not None else not over

    def finish_step(self) -> None:
        """Ends the step whose last micro-batch was yielded: the loss is reduced, and `world.step.agreed` refreshed.

        Called by `commit`, and when the next micro-batch is asked for; more than once does no harm. Collective.

        Raises:
            StepError: micro-batches of the step are still to come.
        """
        if self._open is None:
            return
        if not self.step_ends:
            raise StepError(
                f"the step is not over: micro-batch {self._open.micro + 1} of {len(self._open.step.micro)}; step, "
                "zero_grad and commit belong under `if batches.step_ends:`"
            )
        if self._skips is not None:
            self._skips.note(self._open.step, self._open.skipped)
        step, self._open = self._open.step, None
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
        for start in range(self._cursor, self._reached, self.batch_size):
            stop = min(start + self.batch_size, self._reached)
            skipped = () if self._skips is None else self._skips.take(start)
            indices = self._order.take(start, stop)
            self._ledger.enter(self._epoch, start, indices, batch_size=self.batch_size, skipped=skipped)
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
        if self._open is None:
            raise StepError("mean() belongs inside the loop over the shards: no micro-batch is being processed")
        value = self._open.share(losses, mask)
        self._report.add(value, self._open.place)
        ranks = self._world.data.size
        if ranks > 1 and self._world.virtual is None and value.requires_grad:
            value.register_hook(lambda gradient: gradient * ranks)  # type: ignore[no-untyped-call]  # [2]
        return value

    def state_dict(self) -> dict[str, Any]:
        """Returns the committed position and the ledger: plain data, the same on every rank and world size.

        `samestep.data.audit` says from it alone whether every sample was consumed once.
        """
        return {
            "order": ORDER_VERSION,
            "samples": self._cut.total,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._cut.drop_last,
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
            if state[name] != mine[name]:
                raise DataError(
                    f"the saved run had {name} {state[name]}, this one has {mine[name]}: its position in the data "
                    "means nothing here"
                )
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        ledger = Ledger.of(state["ledger"]) if "ledger" in state else Ledger(begins=(epoch, cursor))
        self._go_to(epoch, cursor)
        self._ledger = ledger


def shards(
    dataset: Any,
    world: World,
    *,
    batch_size: int,
    micro_batch_size: int | None = None,
    weight: Callable[[Any], float | torch.Tensor] | None = None,
    workers: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_streams: bool = True,
    on_bad_sample: Literal["raise", "skip"] = "raise",
) -> Shards:
    """Returns this rank's part of `dataset`: batches on `world.device`, every sample once an epoch, no padding.

    The order is a function of the seed and the epoch alone, whatever the number of ranks and workers. Ranks take
    contiguous slices of each step, uneven where they must be; a rank without samples gets an empty batch (dim 0 is 0).

    Args:
        dataset: map-style, with `__len__` and `__getitem__`; its `set_epoch(epoch)` is called where it has one.
        world: the world; its data axis shares the samples out.
        batch_size: samples of one optimizer step, over all ranks.
        micro_batch_size: most samples of one forward on one rank; a step is then several, on every rank equally many.
        weight: the items in a batch that the loss is a mean over, such as unmasked tokens; default: samples. Then
            the loader looks one step ahead, to know the weight of the whole step before its first forward.
        workers: loading processes of this rank; 0 loads in this one.
        seed: of the order.
        shuffle: false takes the samples as they lie, such as for a curriculum.
        drop_last: leave out a last step shorter than `batch_size`; by default it is taken, rightly weighted.
        collate_fn: makes a batch of a list of samples, as in DataLoader.
        sample_streams: seed Python's, NumPy's and torch's CPU generator before each sample, from the seed, the epoch
            and its index, so that augmentation depends on neither workers nor ranks nor resumes. Costs 7 us a sample,
            and calls `__getitem__` where the dataset has `__getitems__` too. False leaves the generators alone.
        on_bad_sample: what happens when `__getitem__` raises: "raise" names the sample, its worker, its file and its
            line; "skip" leaves it out on all ranks, as if the step were smaller, and records it in the ledger.

    Raises:
        DataError: the dataset is empty, has no length or no random access, or the batch size is smaller than the
            data axis. While iterating: a sample could not be loaded, or a worker died.

    Example:
        >>> import samestep, torch
        >>> data = torch.utils.data.TensorDataset(torch.arange(10))
        >>> with samestep.world() as world:
        ...     batches = samestep.shards(data, world, batch_size=4, shuffle=False)
        ...     for (x,) in batches:
        ...         print(x.tolist())
        [0, 1, 2, 3]
        [4, 5, 6, 7]
        [8, 9]
    """
    total = check_dataset(dataset)
    virtual = world.virtual
    _check_sizes(batch_size, micro_batch_size, workers, world.slices)
    if virtual is not None and not sample_streams:
        raise DataError("sample_streams=False lets samples depend on which rank loads them: not with virtual ranks")
    if on_bad_sample not in {"raise", "skip"}:
        raise DataError(f'on_bad_sample={on_bad_sample!r} is neither "raise" nor "skip"')
    if drop_last and total < batch_size:
        raise DataError(f"drop_last leaves nothing: {total} samples are less than one batch of {batch_size}")
    loader = Loader(
        dataset,
        workers=workers,
        collate_fn=collate_fn,
        pin_memory=world.device.type == "cuda",
        seeded=lambda epoch: seeds.generator(seed, "workers", epoch, world.data.rank),
        streams=SampleStreams(seed) if sample_streams else None,
        skip=on_bad_sample == "skip",
    )
    rank, held = (world.data.rank, 1) if virtual is None else (virtual.first, virtual.held)
    cut = Cut(total, batch_size, micro_batch_size, rank, world.slices, drop_last, held)
    return Shards(loader, cut, world, seed=seed, shuffle=shuffle, weigh=weight)


def _check_sizes(batch_size: int, micro_batch_size: int | None, workers: int, slices: int) -> None:
    if batch_size < 1 or (micro_batch_size is not None and micro_batch_size < 1) or workers < 0:
        raise DataError(
            f"batch_size {batch_size} and micro_batch_size {micro_batch_size} must be at least 1, and workers "
            f"{workers} at least 0"
        )
    if batch_size < slices:
        raise DataError(
            f"batch_size {batch_size} is smaller than the {slices} ranks that share it: batch_size is global, so give "
            f"at least {slices}, or start fewer ranks"
        )
