"""What is worth knowing of a DataLoader, of what a backward pass begins with, and of a value that is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from samestep.data.iterable import dataset_length
from samestep.instrument.dataloader import made_at, samplers_of
from samestep.verification.recording.naming import bare

__all__: list[str] = []

_MOST_LINKS = 8
_OF_SHUFFLING = ("set_epoch", "epoch", "seed", "generator", "rng", "random_state")  # what only a shuffling sampler has
_POWERS = {"MulBackward0": 1, "DivBackward0": -1}


def described(loader: Any) -> dict[str, Any]:
    """Returns what a journal says of a DataLoader when a pass begins."""
    sampler, *cutting = samplers_of(loader)
    return {
        "length": dataset_length(loader),
        "samples": dataset_length(loader.dataset),
        "dataset": type(loader.dataset).__name__,
        "made": made_at(loader.dataset),
        "sampler": type(sampler).__name__,
        "sampler_made": made_at(sampler),
        "cut_by": next((type(one).__name__ for one in cutting if type(one) is not BatchSampler), None),
        "rank": _number(getattr(sampler, "rank", None)),
        "replicas": _number(getattr(sampler, "num_replicas", None)),
        "replacement": bool(getattr(sampler, "replacement", False)),
        "epoch": getattr(sampler, "epoch", None),
        "dataset_epoch": _number(getattr(loader.dataset, "epoch", None)),
        "shuffles": any(map(_shuffles, (sampler, *cutting))),
        "drop_last": any(getattr(one, "drop_last", False) for one in (loader, sampler, *cutting)),
        "batch_size": loader.batch_size,
        "workers": loader.num_workers,
    }


def _shuffles(sampler: Any) -> bool:
    """Whether a sampler is asked for another order in every epoch."""
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return True
    if hasattr(sampler, "shuffle"):
        return bool(sampler.shuffle)
    return any(hasattr(sampler, name) for name in _OF_SHUFFLING)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def scale_of(root: Any) -> dict[str, Any]:
    """Returns by which constant a loss was multiplied before its backward pass, and what kind of loss it is.

    A division by 4 is `(mean of the batch) ÷ 4`: {"factor": 0.25, "loss": "NllLossBackward0"}. Only what autograd's
    graph shows: a chain of multiplications and divisions by numbers, from the root on.
    """
    tensor = root[0] if isinstance(root, list | tuple) and len(root) == 1 else root
    if not isinstance(tensor, Tensor) or tensor.dim() or tensor.grad_fn is None:
        return {}
    node: Any = tensor.grad_fn
    factor = 1.0
    for _ in range(_MOST_LINKS):
        before = [one for one, _ in node.next_functions if one is not None]
        number = getattr(node, "_saved_other", None)
        if type(node).__name__ not in _POWERS or len(before) != 1 or number is None or number.numel() != 1:
            break
        power = _POWERS[type(node).__name__]
        if power < 0 and not float(number):
            break  # a mean of nothing, which is NaN: the script's business, no constant
        factor *= float(number) ** power
        node = before[0]
    mean = getattr(node, "_saved_reduction", 1) == 1  # of a loss function; torch's number for "mean"
    return {"loss": type(node).__name__, "factor": factor, "mean": mean, "value": float(tensor.detach())}


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the name and value of every tensor in nested dictionaries and lists."""
    if isinstance(value, Tensor):
        yield bare(name), value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from tensors_in(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from tensors_in(one, f"{name}.{index}" if name else str(index))
