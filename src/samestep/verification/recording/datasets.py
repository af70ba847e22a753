"""What a rank's DataLoader and dataset hold: settings, digests of a few samples, random generators.

The samples are loaded again when the script has ended. All generators, also those that the dataset holds, are seeded
equally for it on all ranks, so that augmentation makes no difference, and are restored afterwards. Where a dataset
holds generators of equal states, two ranks draw the same noise for different samples.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from samestep.data.iterable import dataset_length
from samestep.instrument.dataloader import generator_state, is_generator, made_at, restore_generator, samplers_of
from samestep.instrument.patch import is_own
from samestep.launch.rank.user_code import relative_path
from samestep.runtime.digest import digest, digest_of_bytes
from samestep.runtime.rng import RngState, seed_device
from samestep.verification.recording.rows import leaves, row_digests

_OF_SHUFFLING = ("set_epoch", "epoch", "seed", "generator", "rng", "random_state")  # what only a shuffling sampler has
_SAMPLES = 5
_MOST_CHOSEN = 1 << 22
_DEPTH = 3  # of objects in objects: a subset, its dataset, that one's transforms


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
        "persistent": bool(loader.persistent_workers),
    }


def chosen(dataset: Any) -> torch.Tensor | None:
    """Returns which samples a Subset has of the dataset that it, or a subset in it, is made of; None of other datasets.

    >>> from torch.utils.data import Subset
    >>> chosen(Subset(Subset([5, 6, 7, 8], [1, 3]), [1]))
    tensor([3])
    """
    if not isinstance(dataset, Subset) or len(dataset) > _MOST_CHOSEN:
        return None
    inner, own = chosen(dataset.dataset), torch.as_tensor(list(dataset.indices))
    return own if inner is None else inner[own]


def _shuffles(sampler: Any) -> bool:
    """Whether a sampler is asked for another order in every epoch."""
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return True
    if hasattr(sampler, "shuffle"):
        return bool(sampler.shuffle)
    return any(hasattr(sampler, name) for name in _OF_SHUFFLING)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def fingerprint(dataset: Any) -> dict[str, str]:
    """Returns index -> digest of a few samples; empty for a dataset without an index, or one that refuses.

    And for one whose samples are other ones whenever they are loaded, though generators are seeded.
    """
    try:
        size = len(dataset)
        places = sorted({i * (size - 1) // max(_SAMPLES - 1, 1) for i in range(_SAMPLES)}) if size else []
        digests = dict(_samples(dataset, places))
        return digests if places and digests == dict(_samples(dataset, places)) else {}
    except Exception:  # noqa: BLE001  (the dataset is the script's, and the script is over)
        return {}


def _samples(dataset: Any, places: list[int]) -> Iterator[tuple[str, str]]:
    with _seeded_equally(), own_generators_seeded(dataset):
        for place in places:
            yield str(place), sample_digest(dataset[place])


def mixes(dataset: Any, collate: Any) -> bool:
    """Returns whether a collate function makes a row of several samples, or of a sample's place in the batch.

    With the samples in the opposite order, it then makes other rows of them.

    >>> with_next = lambda samples: [torch.stack(samples), torch.stack(samples).roll(1, 0)]
    >>> mixes(torch.eye(4), with_next), mixes(torch.eye(4), torch.stack)
    (True, False)
    """
    if collate is default_collate or collate is default_convert:  # one of the script's may have no hash
        return False
    try:
        with _seeded_equally(), own_generators_seeded(dataset):
            samples = [dataset[place] for place in range(min(len(dataset), _SAMPLES))]
        mine, theirs = (_rows_of(copy.deepcopy(one), collate) for one in (samples, samples[::-1]))
    except Exception:  # noqa: BLE001  (the script's own)
        return False
    return mine != theirs


def _rows_of(samples: list[Any], collate: Any) -> Counter[str]:
    with _seeded_equally():
        return Counter(row_digests(collate(samples), len(samples), loaded=True))


@contextmanager
def _seeded_equally() -> Iterator[None]:
    here = torch.device("cpu")
    before = RngState.capture(here)
    seed_device(0, here)
    try:
        yield
    finally:
        before.restore()


def sample_digest(sample: Any) -> str:
    whole = xxhash.xxh3_64()
    for leaf in leaves(sample):
        whole.update(_bytes_of(leaf))
    return whole.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        return digest(leaf).encode()
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return leaf.tobytes()
    if hasattr(leaf, "tobytes"):  # an image
        return bytes(leaf.tobytes())
    return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float | bool | None) else b""


@dataclass(frozen=True)
class Held:
    """The generators that a dataset holds."""

    state: str  # digest of their states
    where: str | None  # the line of the user's that gives the first of them to what holds it, if it is known


def held_by(dataset: Any) -> Held | None:
    """Returns the generators that a dataset holds; None where it holds none.

    >>> class Noisy:
    ...     def __init__(self, seed):
    ...         self.generator = np.random.default_rng(seed)
    >>> held_by(Noisy(1)).state == held_by(Noisy(1)).state, held_by(Noisy(1)).state == held_by(Noisy(2)).state
    (True, False)
    >>> held_by([1, 2]) is None
    True
    """
    found = list(_within(dataset, _DEPTH, set()))
    if not found:
        return None
    digest = digest_of_bytes(" ".join(_state(generator) for generator, _, _ in found).encode())
    return Held(digest, next((where for _, owner, name in found if (where := _given_at(owner, name))), None))


@contextmanager
def own_generators_seeded(dataset: Any) -> Iterator[None]:
    """Seeds the generators that a dataset holds, all equally, and restores their states at the end.

    >>> class Noisy:
    ...     def __init__(self, seed):
    ...         self.generator = np.random.default_rng(seed)
    >>> first, other = Noisy(1), Noisy(2)
    >>> with own_generators_seeded(first), own_generators_seeded(other):
    ...     first.generator.random() == other.generator.random()
    True
    """
    found = [one for one, _, _ in _within(dataset, _DEPTH, set())]
    before = [(one, generator_state(one)) for one in found]
    for one in found:
        restore_generator(one, generator_state(_made_equally(one)))
    try:
        yield
    finally:
        for one, state in before:
            restore_generator(one, state)


def _made_equally(generator: Any) -> Any:
    """A new generator of the same kind, with the seed 0."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(0)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)(0))
    return np.random.RandomState(0) if isinstance(generator, np.random.RandomState) else random.Random(0)  # noqa: S311


def _within(
    value: Any, depth: int, seen: set[int], owner: Any = None, name: str = ""
) -> Iterator[tuple[Any, Any, str]]:
    """Yields generators, what holds each, and as which attribute."""
    if is_generator(value):
        yield value, owner, name
        return
    if id(value) in seen or not depth or isinstance(value, torch.Tensor | np.ndarray | str | bytes | type):
        return
    seen.add(id(value))
    if isinstance(value, list | tuple):
        for one in value[:16]:
            yield from _within(one, depth - 1, seen, owner, name)
    else:
        for attribute, one in list(getattr(value, "__dict__", {}).items()):
            yield from _within(one, depth - 1, seen, value, attribute)


def _given_at(owner: Any, name: str) -> str | None:
    """The first line in the code of a user's class that assigns an attribute."""
    try:
        lines, first = inspect.getsourcelines(type(owner))
        path = inspect.getsourcefile(type(owner)) or ""
    except (OSError, TypeError):
        return None
    given = re.compile(rf"\bself\.{re.escape(name)}\s*(?::[^=]+)?=[^=]")
    number = next((first + place for place, line in enumerate(lines) if given.search(line)), None)
    return None if number is None or not is_own(path) else f"{relative_path(path)}:{number}"


def _state(generator: Any) -> str:
    state = generator_state(generator)
    if isinstance(state, torch.Tensor):
        return digest(state)
    with np.printoptions(threshold=2**16):
        return digest_of_bytes(repr(state).encode())
