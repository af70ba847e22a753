"""Evaluation over all ranks, of every sample once, with the answer one process would give.

Each rank takes a contiguous slice of the dataset, uneven, nothing padded. A metric runs on rank 0 and sees all outputs
in dataset order: any function of them is exact, and ranks cannot differ in its last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from samestep.checkpoints.encoder import pack, unpack
from samestep.data.batches import DevicePrefetcher
from samestep.data.loader import Loader, LoaderSettings, SampleSeeds
from samestep.data.order import SampleOrder, StepPartition
from samestep.errors import CheckpointError, DataError
from samestep.progress import phase
from samestep.runtime import exchange
from samestep.runtime.world import World
from samestep.seeding import derive_seed
from samestep.topology import cut_evenly

__all__ = ["evaluate"]

Metric = Callable[[Tensor, Tensor], Any]


class MapDataset(Protocol):
    """What evaluation needs of a dataset: a length, and samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@phase("evaluate")
def evaluate(
    fn: Callable[[Any], tuple[Tensor, Tensor]],
    dataset: MapDataset,
    world: World,
    *,
    batch_size: int,
    metrics: Mapping[str, Metric],
    workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> dict[str, Any]:
    """Runs `fn` over every sample of `dataset` once, shared out over the ranks; returns each metric's value.

    Collective: every rank must call it, with the same dataset, batch size and metrics. Buffers are made equal first
    (rank 0's). All replicas of `world` are in eval mode meanwhile and each submodule gets its own mode back, also
    after an error; a model that was never replicated is the caller's to put in eval mode. Gradients are off, and no
    global random stream is touched: a dataset that draws gets for each sample a stream of its own, the same every time.

    Args:
        fn: takes a batch, on `world.device`, and returns `(outputs, targets)`: tensors whose dim 0 runs over the
            samples of the batch (or a whole number of rows for each: tokens, say). Where outputs are large, let it
            return what the metric needs instead: one "correct" flag for each sample rather than its 1000 logits.
        dataset: has a length and samples by number.
        world: as made by :func:`samestep.world`.
        batch_size: samples in flight on all ranks of the data axis together; each takes at most its share, rounded up.
        metrics: name to `metric(outputs, targets)`, called on rank 0 with all rows in dataset order, on the host.
            It returns a number, text, None, a tensor or an array (which arrive as such on the host), or lists, tuples
            and dicts of these.
        workers: processes of this rank that load samples.
        collate_fn: makes a batch of a list of samples; PyTorch's default if None.

    Returns:
        The metrics' values by name, in the order of `metrics`; equal bit for bit on every rank.

    Raises:
        DataError: the dataset is empty, has no length or differs in length between ranks; `batch_size` is less than
            1; `fn` returned something else than two tensors with rows for each sample; a metric's value cannot be
            sent.
        PeerError: another rank failed; says which, and why. The failing rank raises its own error.

    Example:
        >>> import samestep, torch
        >>> world, model = samestep.world(), torch.nn.Linear(2, 2).eval()
        >>> data = torch.utils.data.TensorDataset(torch.randn(5, 2), torch.tensor([0, 1, 1, 0, 1]))
        >>> result = samestep.evaluate(
        ...     lambda batch: (model(batch[0]).argmax(1), batch[1]),
        ...     data,
        ...     world,
        ...     batch_size=4,
        ...     metrics={"samples": lambda o, t: len(t), "accuracy": lambda o, t: (o == t).double().mean()},
        ... )
        >>> result["samples"]
        5

    With scikit-learn: `metrics={"auc": lambda o, t: roc_auc_score(t, o.softmax(1)[:, 1])}`.
    """
    length = _agreed_length(dataset, batch_size, world)
    step = StepPartition(0, length, tuple(_batches(length, batch_size, world)))
    _equalise_buffers(world)
    settings = LoaderSettings(
        workers=workers,
        collate_fn=collate_fn,
        pin_memory=world.device.type == "cuda",
        # else torch draws from, and so moves, the global stream
        worker_generator=lambda _: world.generator("evaluation"),
        sample_seeds=SampleSeeds(derive_seed(world.seed or 0, "evaluation")),
    )

    def outputs_and_targets() -> tuple[Tensor, Tensor]:
        with torch.no_grad(), _eval_mode(world.replicas):
            loaded = Loader(dataset, settings, skip=False).read(SampleOrder(length, shuffle=False), [step])
            batches = DevicePrefetcher(world.device).stream_through(part.batch for part in loaded)
            return _run(fn, batches, [stop - start for start, stop in step.micro])

    outputs, targets = exchange.run_on_all_ranks(world.data, outputs_and_targets)
    return _measure(metrics, _gather_rows(outputs, world), _gather_rows(targets, world), world)


# --- which rank takes which samples ----------------------------------------------------------


def _agreed_length(dataset: MapDataset, batch_size: int, world: World) -> int:
    def checked_length() -> int:
        kind = type(dataset).__name__
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise DataError(f"cannot evaluate a {kind}: samples are shared out by number, so __getitem__ is needed")
        try:
            length = len(dataset)
        except TypeError as error:
            raise DataError(f"cannot evaluate a {kind} without a length: give it __len__") from error
        if length == 0:
            raise DataError(f"cannot evaluate an empty {kind}: it has 0 samples")
        if batch_size < 1:
            raise DataError(f"batch_size must be 1 or more, got {batch_size}")
        return length

    length = exchange.run_on_all_ranks(world.data, checked_length)
    lengths = exchange.all_gather_json(world.data, length)
    if len(set(lengths)) > 1:
        each = ", ".join(f"rank {rank}: {n}" for rank, n in zip(world.data.ranks, lengths, strict=True))
        raise DataError(f"the ranks evaluate datasets of different lengths ({each}); give every rank the whole dataset")
    return length


def _batches(length: int, batch_size: int, world: World) -> list[tuple[int, int]]:
    """This rank's batches of samples [start, stop); those of virtual ranks are cut alike on any number of ranks."""
    slices, virtual = cut_evenly(length, world.slices), world.virtual
    first, held = (world.data.rank, 1) if virtual is None else (virtual.first, virtual.local_count)
    most = math.ceil(batch_size / world.slices)
    return [
        (at, min(at + most, stop)) for start, stop in slices[first : first + held] for at in range(start, stop, most)
    ]


def _equalise_buffers(world: World) -> None:
    """A replica that is garbage on one rank may still be alive on another; only those that all hold are equalised."""
    alive = {replica.number: replica for replica in world.replicas}
    everywhere = set.intersection(*(set(numbers) for numbers in exchange.all_gather_json(world.data, sorted(alive))))
    for number in sorted(everywhere):
        alive[number].sync_buffers()


# --- one rank's part -------------------------------------------------------------------------


@contextmanager
def _eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        # Parents come before children, so a child's own mode has the last word. train() and not the attribute:
        # modules that merge weights for inference undo it there.
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)


def _run(
    fn: Callable[[Any], tuple[Tensor, Tensor]], batches: Iterator[Any], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns outputs and targets of all batches; on a GPU the next one is copied there while `fn` computes."""
    rows = [_checked(fn(batch), samples) for batch, samples in zip(batches, sizes, strict=True)]
    if not rows:
        return torch.empty(0), torch.empty(0)
    outputs, targets = zip(*rows, strict=True)
    return torch.cat(outputs), torch.cat(targets)


def _checked(result: Any, samples: int) -> tuple[Tensor, Tensor]:
    if not (isinstance(result, tuple | list) and len(result) == 2 and all(isinstance(part, Tensor) for part in result)):
        raise DataError(f"fn must return (outputs, targets), two tensors; it returned a {type(result).__name__}")
    for name, part in zip(("outputs", "targets"), result, strict=True):
        if part.dim() == 0 or part.size(0) == 0 or part.size(0) % samples:
            raise DataError(
                f"fn returned {name} of shape {tuple(part.shape)} for a batch of {samples} samples: "
                "dim 0 must run over the samples; leave means to the metrics, which see every row"
            )
    outputs, targets = result
    if outputs.size(0) != targets.size(0):
        raise DataError(f"fn returned {outputs.size(0)} rows of outputs but {targets.size(0)} of targets")
    return outputs.cpu(), targets.cpu()


# --- all ranks' parts ------------------------------------------------------------------------


def _gather_rows(part: Tensor, world: World) -> Tensor:
    parts = exchange.all_gather_tensors(world.data, part)
    return torch.cat([rows for rows in parts if rows.size(0)])  # a rank without samples does not know the other dims


def _measure(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor, world: World) -> dict[str, Any]:
    """The metrics' values as rank 0 computes them, the same bits on every rank."""

    def packed() -> dict[str, tuple[Any, str]]:
        if world.data.rank != 0:
            return {}
        with torch.no_grad():
            return {name: _packed(metric(outputs, targets), name) for name, metric in metrics.items()}

    values = exchange.broadcast_json(world.data, exchange.run_on_all_ranks(world.data, packed))
    return {name: unpack(tree, bytes.fromhex(tensors)) for name, (tree, tensors) in values.items()}


def _packed(value: Any, name: str) -> tuple[Any, str]:
    try:
        tree, tensors = pack(_with_numbers(value), name)
    except CheckpointError as error:
        raise DataError(
            f"metric {name!r} returned a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to "
            "the other ranks; return numbers, text, None, tensors, arrays, or lists, tuples and dicts of these"
        ) from error
    return tree, tensors.hex()


def _with_numbers(value: Any) -> Any:
    """Returns 0-dim tensors as numbers, which can be compared."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        return value.item()
    if type(value) in {list, tuple}:
        return type(value)(map(_with_numbers, value))
    if isinstance(value, dict):
        return {_with_numbers(key): _with_numbers(item) for key, item in value.items()}
    return value
