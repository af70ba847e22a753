"""Before a step the ranks of a replica check that they take the same one.

    rank 0, first stage    8 samples of shape [6] in 4 micro-batches      takes the inputs
    rank 1, last stage     3 samples of shape [6] in 3 micro-batches      takes the targets, and waits for ever

Ranks of one replica that load different samples (a DistributedSampler over all ranks does that) would wait for each
other, or, worse, train the inputs of one on the targets of the other. So each starts a sum of a digest of its batch,
goes on, and looks at the result when it first needs something of the others: two numbers say whether all are equal.

    v = digest of shapes and some targets, below 2^20       all are equal   <=>   p * (sum of v^2) = (sum of v)^2

Whether parameters require gradients decides what is sent: where that has changed on any rank, all exchange it, and
describe their messages anew. PyTorch's stages hang, or go on with what they once found.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.batches import tensors_of
from samestep.errors import DataError, ModelError
from samestep.pipelines.tensor_meta import TensorMeta, describe
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.scalar_sums import PendingSum, StepTag

Ranges = Sequence[tuple[int, int]]  # by micro-batch, its samples

SAMPLED_VALUES = 64  # of a tensor, spread over all of it
_BITS = 20  # of a digest: sums of squares over thousands of ranks are exact
_CHANGED = 1 << 36  # above all sums of digests


def split_targets(batch: Any) -> tuple[Sequence[Any], Any]:
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise DataError(
            f"a pipeline's batch is a {type(batch).__name__}: it takes inputs and targets, in a tuple or list, the "
            "targets last"
        )
    return batch[:-1], batch[-1]


def count_samples(batch: Sequence[Any]) -> int:
    sizes = {len(each) for each in tensors_of(batch)}
    if not sizes:
        raise DataError("the batch has no tensor: inputs and targets are tensors, of which dim 0 runs over the samples")
    if len(sizes) != 1:
        raise DataError(
            f"the tensors of a batch have {' and '.join(map(str, sorted(sizes)))} samples: dim 0 must agree"
        )
    return sizes.pop()


def _shape_keys(inputs: Sequence[Any], ranges: Ranges) -> list[tuple[Any, ...]]:
    for place, each in enumerate(inputs):
        if not isinstance(each, Tensor):
            raise DataError(
                f"input {place} of the batch is a {type(each).__name__}: the first stage is given tensors, so give "
                "each tensor in it as an input of its own"
            )
    return [tuple((each.dtype, each.shape[1:], end - begin) for each in inputs) for begin, end in ranges]


def _describe_batch(batch: Any, ranges: Ranges) -> str:
    """Returns a batch in words.

    >>> _describe_batch((torch.ones(3, 2), torch.zeros(3)), [(0, 2), (2, 3)])
    '3 samples in 2 micro-batches (float32 [3, 2], float32 [3])'
    """
    shapes = describe(tuple(map(TensorMeta.of, tensors_of(batch))))
    return f"{count_samples(batch)} samples in {len(ranges)} micro-batches ({shapes})"


def sample_bytes(targets: Any) -> Iterator[bytes]:
    """Yields some values of the tensors that are on the host: others would have to be waited for.

    >>> [each.hex() for each in sample_bytes(torch.tensor([1, 2], dtype=torch.uint8))]
    ['0102']
    """
    for each in tensors_of(targets):
        if each.device.type == "cpu" and each.layout == torch.strided and each.numel():
            flat = each.detach().flatten()
            some = flat[:: -(-len(flat) // SAMPLED_VALUES)].contiguous()
            yield some.view(torch.uint8).numpy().tobytes()


class CheckedShapes:
    """The shape keys of a step's micro-batches; asking for one first checks that all ranks have the same."""

    def __init__(self, check: BatchCheck, keys: Sequence[Hashable], pending: PendingSum, text: str) -> None:
        self._check, self._keys, self._text = check, keys, text
        self._pending: PendingSum | None = pending

    def __getitem__(self, micro_batch: int) -> Hashable:
        return self.verify(), self._keys[micro_batch]

    def verify(self) -> int:
        """Waits for the sum once; returns how often `requires_grad` has changed. Collective over the pipeline."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            first, squares = pending.wait()
            self._check.verify(first, squares, self._text)
        return self._check.changes


ShapeKeys = CheckedShapes | Sequence[Hashable]  # by micro-batch, equal on all ranks and for micro-batches of one shape


class BatchCheck:
    """Checks the batches of one rank against those of the others."""

    def __init__(
        self, axis: Axis, number: int, parameters: Mapping[str, nn.Parameter], aliases: Mapping[str, str]
    ) -> None:
        self._axis, self._number = axis, number
        self._parameters, self._aliases = parameters, aliases
        self._requires_grad: dict[str, bool] = {}
        self._steps = self.changes = 0

    def start(self, inputs: Sequence[Any], targets: Any, ranges: Ranges, *, trains: bool) -> CheckedShapes:
        """Tells the other ranks what this one is about to do; returns its shape keys. Collective over the pipeline.

        Raises:
            DataError: an input is no tensor; or, when a key is asked for, the ranks have different batches.
            ModelError: then, where a weight requires a gradient under one of its names only.
            StepError: then, where the ranks call different things.
        """
        keys = _shape_keys(inputs, ranges)
        requires_grad = {name: each.requires_grad for name, each in self._parameters.items()}
        changed, self._requires_grad = requires_grad != self._requires_grad, requires_grad
        self._steps += 1
        if trains:
            text = f"a step of {_describe_batch([*inputs, targets], ranges)}"
        else:
            text = f"outputs of {_describe_batch(inputs, ranges)}"
        value = _digest(text, targets)
        tag = StepTag("batch", self._number, 0, self._steps)
        pending = self._axis.start_sum(float(value + _CHANGED * changed), float(value * value), tag=tag)
        shapes = CheckedShapes(self, keys, pending, text)
        if self._axis.size == 1:
            shapes.verify()
        return shapes

    def verify(self, first: float, squares: float, text: str) -> None:
        """Looks at the sums of all ranks' values; `text` is this rank's step in words. Collective if they differ."""
        changed, values = divmod(int(first), _CHANGED)
        if self._axis.size * int(squares) != values * values:
            texts, ranks = all_gather_json(self._axis, text), self._axis.ranks
            other = next((place for place, each in enumerate(texts) if each != texts[0]), None)
            what = (
                f"rank {ranks[0]} takes {texts[0]}, rank {ranks[other]} {texts[other]}"
                if other is not None
                else f"ranks {', '.join(map(str, ranks))} have targets of other values"
            )
            raise DataError(
                f"the ranks of a pipeline do not have the same batch: {what}. The first stage takes the inputs and the "
                "last the targets: load with samestep.shards, or by one seed on all ranks of world.pipeline"
            )
        if changed:
            self._exchange_requires_grad()

    def _exchange_requires_grad(self) -> None:
        """Checks that a weight of several stages is frozen under all of its names. Collective over the pipeline."""
        self.changes += 1
        tied = {*self._aliases, *self._aliases.values()}
        own = {name: requires_grad for name, requires_grad in self._requires_grad.items() if name in tied}
        known: dict[str, tuple[str, bool]] = {}
        for theirs in all_gather_json(self._axis, own):
            for name, requires_grad in theirs.items():
                other, before = known.setdefault(self._aliases.get(name, name), (name, requires_grad))
                if before != requires_grad:
                    frozen, free = (name, other) if before else (other, name)
                    raise ModelError(
                        f"{frozen} does not require grad and {free} does, and they are one weight in several stages: "
                        "freeze it under all of its names, or before the model is cut"
                    )


def _digest(text: str, targets: Any) -> int:
    """Returns 20 bits, which two different batches share once in a million times."""
    value = zlib.crc32(text.encode())
    for each in sample_bytes(targets):
        value = zlib.crc32(each, value)
    return value & ((1 << _BITS) - 1)
