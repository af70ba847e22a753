"""`shards`: checks its arguments, and makes the shards of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Literal

import torch

from samestep.data.costs import Buckets, Costs
from samestep.data.iterable import Kind, StreamLoader, compare_first_items, inspect_dataset, own_sizes
from samestep.data.loader import Loader, LoaderSettings, SampleSeeds
from samestep.data.order import UNKNOWN, StepPartitioner
from samestep.data.shards import Shards
from samestep.data.unbounded import SelfShardedShards, StatefulLoaderShards, UnknownLengthShards, micro_batches_of
from samestep.errors import DataError
from samestep.runtime import rng
from samestep.runtime.world import World

__all__ = ["shards"]


def shards(
    dataset: Any,
    world: World,
    *,
    batch_size: int,
    micro_batch_size: int | None = None,
    weight: Callable[[Any], float | torch.Tensor] | None = None,
    workers: int = 0,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_streams: bool = True,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    cost: Callable[[int], Any] | Sequence[Any] | Any = None,
    bucket: int | None = None,
    splits_itself: bool = False,
) -> Shards:
    """Returns this rank's part of `dataset`: batches on `world.device`, every sample once an epoch, no padding.

    The order is a function of the seed and the epoch alone, whatever the number of ranks and workers. Ranks take
    contiguous slices of each step, uneven where they must be; a rank without samples gets an empty batch (dim 0 is 0).

    Args:
        dataset: with `__len__` and `__getitem__`; or with `__iter__` alone, and then perhaps `__len__` and
            `iter_from(position)`; or a StatefulDataLoader of torchdata for each rank. `Shards.promise` says what that
            allows. Its `set_epoch(epoch)` is called where it has one.
        world: the world; its data axis shares the samples out.
        batch_size: samples of one optimizer step, over all ranks.
        micro_batch_size: most samples of one forward on one rank; a step is then several, on every rank equally many.
        weight: the items in a batch that the loss is a mean over, such as unmasked tokens; default: samples. Then
            the loader looks one step ahead, to know the weight of the whole step before its first forward.
        workers: loading processes of this rank; 0 loads in this one.
        seed: of the order.
        shuffle: false takes the samples as they lie, such as for a curriculum; by default samples with random access
            are shuffled. What can only be iterated comes in an order of its own.
        drop_last: leave out a last step shorter than `batch_size`; by default it is taken, rightly weighted.
        collate_fn: makes a batch of a list of samples, as in DataLoader.
        sample_streams: seed Python's, NumPy's and torch's CPU generator before each sample, from the seed, the epoch
            and its index, so that augmentation depends on neither workers nor ranks nor resumes. Costs 7 us a sample,
            and calls `__getitem__` where the dataset has `__getitems__` too. False leaves the generators alone.
        on_bad_sample: what happens when `__getitem__` raises: "raise" names the sample, its worker, its file and its
            line; "skip" leaves it out on all ranks, as if the step were smaller, and records it in the ledger.
        cost: what each sample costs, such as its length: one number for each, or a callable that returns it for an
            index without loading. Then a step's samples are shared out so that the slowest rank has little more to
            do than the others, and micro-batches hold samples that cost alike; what a step holds stays the same. A
            batch is taken to cost its number of samples times the largest cost in it, as it does when padded.
        bucket: also let samples that cost alike share a step: within every `bucket` steps of the order. Then what a
            step holds depends on the costs, though not on the number of ranks.
        splits_itself: the dataset is iterable and gives each rank and worker its own part, by asking torch for its
            rank and worker. Else it must give the whole stream to whoever iterates it.

    Raises:
        DataError: the dataset is empty, cannot be read as asked, or the batch size is smaller than the data axis.
            While iterating: a sample could not be loaded, or a worker died.

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
    _check_sizes(batch_size, micro_batch_size, workers, world)
    if on_bad_sample not in {"raise", "skip"}:
        raise DataError(f'on_bad_sample={on_bad_sample!r} is neither "raise" nor "skip"')
    virtual = world.virtual
    if virtual is not None and not sample_streams:
        raise DataError("sample_streams=False lets samples depend on which rank loads them: not with virtual ranks")
    kind, total = inspect_dataset(dataset, splits_itself=splits_itself)
    if kind != "indexed":
        _check_stream(kind, dataset, world, shuffle=shuffle, cost=cost, on_bad_sample=on_bad_sample)
    if total < 1:
        raise DataError(f"{type(dataset).__name__} is empty: an epoch of 0 samples has no step")
    if drop_last and total < batch_size:
        raise DataError(f"drop_last leaves nothing: {total} samples are less than one batch of {batch_size}")
    rank, local = (world.data.rank, 1) if virtual is None else (virtual.first, virtual.local_count)
    partitioner = StepPartitioner(total, batch_size, micro_batch_size, rank, world.slices, drop_last, local)
    if kind == "stateful":
        if workers or collate_fn is not None or micro_batch_size is not None:
            raise DataError("workers, collate_fn and the batch size of a rank are the loader's own: give them to it")
        micro = micro_batches_of(dataset, batch_size, world.data.size)
        return StatefulLoaderShards(dataset, partitioner, world, micro=micro, seed=seed, weigh=weight)
    seeds = SampleSeeds(seed) if sample_streams and kind != "own" else None
    settings = LoaderSettings(
        workers=workers,
        collate_fn=collate_fn,
        pin_memory=world.device.type == "cuda",
        worker_generator=lambda epoch: rng.generator(seed, "workers", epoch, world.data.rank),
        sample_seeds=seeds,
    )
    if kind == "indexed":
        loader = Loader(dataset, settings, skip=on_bad_sample == "skip")
        if cost is None and bucket is not None:
            raise DataError(f"bucket={bucket} needs cost=: what each sample costs, such as its length")
        costs = None if cost is None else Costs(cost, total)
        buckets = None if costs is None or bucket is None else Buckets(costs, bucket, batch_size, partitioner.end)
        shuffled = shuffle is None or shuffle
        return Shards(
            loader, partitioner, world, seed=seed, shuffle=shuffled, weigh=weight, costs=costs, buckets=buckets
        )
    stream = StreamLoader(dataset, settings)
    if kind == "own":
        sizes = own_sizes(batch_size, micro_batch_size, world.data.rank, world.data.size)
        return SelfShardedShards(stream, partitioner, world, sizes=sizes, seed=seed, weigh=weight)
    compare_first_items(dataset, world, seeds)
    made = UnknownLengthShards if total == UNKNOWN else Shards
    return made(stream, partitioner, world, seed=seed, shuffle=False, weigh=weight, kind=kind)


def _check_stream(
    kind: Kind, dataset: Any, world: World, *, shuffle: bool | None, cost: Any, on_bad_sample: str
) -> None:
    name = type(dataset).__name__
    if shuffle:
        raise DataError(
            f"{name} can only be iterated, so its order is its own: leave shuffle out, and let its set_epoch(epoch) "
            "shuffle"
        )
    if cost is not None:
        raise DataError(f"{name} can only be iterated: cost= rearranges samples, which needs random access")
    if on_bad_sample == "skip":
        raise DataError(f'{name} can only be iterated, and is over when it raises: on_bad_sample="skip" cannot go on')
    if kind in {"own", "stateful"} and world.virtual is not None:
        raise DataError(f"{name} splits itself by rank: virtual ranks need data that shards can split")


def _check_sizes(batch_size: int, micro_batch_size: int | None, workers: int, world: World) -> None:
    _check_count("batch_size", batch_size, 1)
    _check_count("micro_batch_size", 1 if micro_batch_size is None else micro_batch_size, 1)
    _check_count("workers", workers, 0)
    if batch_size < world.slices:
        kind, fewer = ("ranks", "start fewer ranks") if world.virtual is None else ("virtual ranks", "have fewer")
        raise DataError(
            f"batch_size {batch_size} is smaller than the {world.slices} {kind} that share it: batch_size is global, "
            f"so give at least {world.slices}, or {fewer}"
        )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DataError(f"{name} {value!r} is no whole number: give {least} or more")
    if value < least:
        raise DataError(f"{name} {value} is too few: give {least} or more")
