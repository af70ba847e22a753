"""What a step of a pipeline is given: inputs and targets, how many samples they have, what their parts look like."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from samestep.data.batches import tensors_of
from samestep.errors import DataError
from samestep.pipelines.forms import Form

__all__: list[str] = []

Cuts = Sequence[tuple[int, int]]  # by micro-batch, its samples
LOOKED_AT = 64  # values of a tensor, spread over all of it


class Kinds(Protocol):
    """By micro-batch, something that is the same on all ranks, and for micro-batches of one shape."""

    def __getitem__(self, micro_batch: int, /) -> Hashable:
        """Returns a micro-batch's."""


def split(batch: Any) -> tuple[Sequence[Any], Any]:
    """Returns inputs and targets.

    Raises:
        DataError: there are no such two.
    """
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise DataError(
            f"a pipeline's batch is a {type(batch).__name__}: it takes inputs and targets, in a tuple or list, the "
            "targets last"
        )
    return batch[:-1], batch[-1]


def samples_of(batch: Sequence[Any]) -> int:
    """Returns how many samples a batch has.

    Raises:
        DataError: its tensors do not agree, or there is none.
    """
    sizes = {len(each) for each in tensors_of(batch)}
    if not sizes:
        raise DataError("the batch has no tensor: inputs and targets are tensors, of which dim 0 runs over the samples")
    if len(sizes) != 1:
        raise DataError(
            f"the tensors of a batch have {' and '.join(map(str, sorted(sizes)))} samples: dim 0 must agree"
        )
    return sizes.pop()


def kinds_of(inputs: Sequence[Any], cuts: Cuts) -> list[tuple[Any, ...]]:
    """Returns what micro-batches that are alike have in common: types and shapes of their inputs.

    Raises:
        DataError: an input is no tensor.
    """
    for place, each in enumerate(inputs):
        if not isinstance(each, Tensor):
            raise DataError(
                f"input {place} of the batch is a {type(each).__name__}: the first stage is given tensors, so give "
                "each tensor in it as an input of its own"
            )
    return [tuple((each.dtype, each.shape[1:], end - begin) for each in inputs) for begin, end in cuts]


def shown(batch: Any, cuts: Cuts) -> str:
    """Returns a batch in words: types and shapes, and into how many micro-batches it is cut.

    >>> shown((torch.ones(3, 2), torch.zeros(3)), [(0, 2), (2, 3)])
    '3 samples in 2 micro-batches (float32 [3, 2], float32 [3])'
    """
    told = ", ".join(str(Form.of(each)) for each in tensors_of(batch))
    return f"{samples_of(batch)} samples in {len(cuts)} micro-batches ({told})"


def glimpse(targets: Any) -> Iterator[bytes]:
    """Yields some values of the tensors that are on the host: others would have to be waited for.

    >>> [each.hex() for each in glimpse(torch.tensor([1, 2], dtype=torch.uint8))]
    ['0102']
    """
    for each in tensors_of(targets):
        if each.device.type == "cpu" and each.layout == torch.strided and each.numel():
            flat = each.detach().flatten()
            some = flat[:: -(-len(flat) // LOOKED_AT)].contiguous()
            yield some.view(torch.uint8).numpy().tobytes()
