"""Changes all of torch for one listener, before a script imports it."""

from __future__ import annotations

from functools import partial

from samestep.launch.imports import when_imported
from samestep.verification.watching import (
    averaging,
    collectives,
    datasets,
    draws,
    ours,
    pipelining,
    printing,
    spawning,
    storage,
    training,
)
from samestep.verification.watching.listener import Callbacks
from samestep.verification.watching.loaders import Loaders
from samestep.verification.watching.plainly import without_chance

__all__: list[str] = []


def begin(listener: Callbacks, *, chance: bool = False) -> None:
    """Tells `listener` of everything from now on, without dropout and autocast, or with `chance`. Imports no torch."""
    if not chance:
        without_chance(listener)
    training.watch(listener)
    storage.watch(listener)
    draws.watch(listener)
    ours.watch(listener)
    averaging.watch(listener)
    printing.watch(listener)
    spawning.watch(listener)
    datasets.watch()
    when_imported("torch.utils.data.dataloader", Loaders(listener).watch)
    when_imported("torch.distributed.pipelining.schedules", partial(pipelining.watch, listener))
    when_imported("torch.distributed", partial(collectives.watch, listener))
