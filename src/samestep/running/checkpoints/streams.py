"""The random streams of every rank: torch's on the host and on the device, Python's and NumPy's.

`torch.save` of a model keeps none of them, so dropout after a resume draws other masks than it would have drawn.
Each rank has streams of its own; all of them go into the one checkpoint, as tensors with a row per rank:

    torch   [W, bytes]   uint8        python   [W, 625]  int64      W  world size
    cuda    [W, bytes]   uint8        numpy    [W, 624]  int64         (0 rows where there is no GPU)
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from samestep.runtime.exchange import gather_json, gather_tensors
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
    streams = {name: torch.cat(gather_tensors(world.everyone, row[None])) for name, row in rows.items()}
    return {"streams": streams, "rest": gather_json(world.everyone, rest)}


def restore(saved: dict[str, Any], world: World) -> None:
    """Puts this rank's streams back where they stood when ``saved`` was gathered by a world of the same size."""
    # Cloned: torch 2.13 crashes in set_rng_state on a row that does not start its storage.
    streams = {name: rows[world.rank].clone() for name, rows in saved["streams"].items()}
    rest = saved["rest"][world.rank]
    torch.set_rng_state(streams["torch"])
    if world.device.type == "cuda" and "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"], world.device)
    version, gauss = rest["python"]
    random.setstate((version, tuple(streams["python"].tolist()), gauss))
    generator, position, has_gauss, cached = rest["numpy"]
    np.random.set_state(  # noqa: NPY002
        {
            "bit_generator": generator,
            "state": {"key": streams["numpy"].numpy().astype(np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": cached,
        }
    )
