"""The random streams of every rank: torch's on the host and on the device, Python's and NumPy's.

`torch.save` of a model keeps none of them, so dropout after a resume draws other masks than it would have drawn.
Each rank has streams of its own; all of them go into the one checkpoint, as tensors with a row per rank:

    torch   [W, bytes]   uint8        python   [W, 625]  int64      W  world size
    cuda    [W, bytes]   uint8        numpy    [W, 624]  int64         (0 rows where there is no GPU)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from samestep.errors import CheckpointError
from samestep.runtime.exchange import all_gather_json, all_gather_tensors
from samestep.runtime.world import World

__all__ = ["gather", "restore"]


def gather(world: World) -> dict[str, Any]:
    """Returns the streams of all ranks as they stand. Collective: every rank must call it."""
    version, words, gauss = random.getstate()
    vector = np.random.get_state(legacy=False)  # noqa: NPY002  (the global stream is what user code draws from)
    rows = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "numpy": torch.from_numpy(vector["state"]["key"].astype(np.int64)),
    }
    if world.device.type == "cuda":
        rows["cuda"] = torch.cuda.get_rng_state(world.device)
    rest = {
        "python": [version, gauss],
        "numpy": [vector["bit_generator"], int(vector["state"]["pos"]), vector["has_gauss"], vector["gauss"]],
    }
    streams = {name: torch.cat(all_gather_tensors(world.everyone, row[None])) for name, row in rows.items()}
    return {"streams": streams, "rest": all_gather_json(world.everyone, rest)}


def restore(saved: dict[str, Any], world: World) -> None:
    """Puts this rank's streams back where they stood when ``saved`` was gathered by a world of the same size.

    Raises:
        CheckpointError: ``saved`` is not what :func:`gather` returns, here or on this number of ranks; nothing was
            put back. May differ between ranks.
    """
    try:
        for put_back in list(_restorers(saved, world)):  # all of them are tried before the first
            put_back()
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the saved random streams of rank {world.rank} cannot be what a run has saved: {type(error).__name__}: "
            f"{str(error)[:100]}"
        ) from error


def _restorers(saved: dict[str, Any], world: World) -> Iterator[Callable[[], object]]:
    """Yields what puts each stream back, after trying its state on a generator that nobody draws from."""
    # Cloned: torch 2.13 crashes in set_rng_state on a row that does not start its storage.
    row = world.rank if world.virtual is None else 0  # with virtual ranks all draw alike between steps
    streams = {name: rows[row].clone() for name, rows in saved["streams"].items()}
    rest = saved["rest"][row]
    host = streams["torch"]
    torch.Generator().set_state(host)
    yield lambda: torch.set_rng_state(host)
    if world.device.type == "cuda" and "cuda" in streams:
        device = streams["cuda"]
        torch.Generator(world.device).set_state(device)
        yield lambda: torch.cuda.set_rng_state(device, world.device)
    version, gauss = rest["python"]
    python = (version, tuple(streams["python"].tolist()), gauss)
    random.Random().setstate(python)  # noqa: S311
    yield lambda: random.setstate(python)
    vector = _numpy_state(streams["numpy"].numpy(), *rest["numpy"])
    np.random.RandomState().set_state(vector)
    yield lambda: np.random.set_state(vector)  # noqa: NPY002


def _numpy_state(key: Any, generator: Any, position: Any, has_gauss: Any, cached: Any) -> dict[str, Any]:
    if not 0 <= position <= len(key) or key.shape != (624,):  # NumPy would read beyond the end
        raise ValueError(f"position {position} in NumPy's state of shape {key.shape}")
    state = {"key": key.astype(np.uint32), "pos": position}
    return {"bit_generator": generator, "state": state, "has_gauss": has_gauss, "gauss": cached}
