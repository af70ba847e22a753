"""A checkpoint that nobody refers to any more though its world is open: that of a function which has returned.

Its last save may be under way still, and may fail; its directory is locked, and signals go to it. So it is closed when
Python forgets it, and what has become of that save is told when the world closes, as of any other.
"""

from __future__ import annotations

import sys
import threading
import weakref

from samestep.running.checkpoints.background import THREAD, Outcome
from samestep.running.checkpoints.leaving import Leaving
from samestep.running.checkpoints.store import Store
from samestep.runtime.world import World

__all__: list[str] = []


def close_when_dropped(state: object, world: World, store: Store | None, leaving: Leaving) -> None:
    """Closes what a checkpoint holds on to when there is no reference to `state` any more; none of them has one."""
    weakref.finalize(state, _close, world, store, leaving).atexit = False  # the world is closed at exit


def told(world: World, outcome: Outcome | None) -> None:
    """Raises why the last save has failed; where another exception is on its way, only says it.

    Raises:
        CheckpointError: on rank 0, if it has.
    """
    if outcome is None or outcome.error is None:
        return
    if sys.exc_info()[1] is None:
        raise outcome.error
    say_unsaved(world, outcome)


def say_unsaved(world: World, outcome: Outcome | None) -> None:
    """Says on rank 0 that a save has failed, and that training continues."""
    if outcome is not None and outcome.error is not None and world.is_first:
        sys.stderr.write(f"samestep: saving step {outcome.step} failed: {outcome.error}; training continues\n")


class _Failed:
    """A save that has failed, until the world closes."""

    def __init__(self, world: World, outcome: Outcome) -> None:
        self._world, self._outcome = world, outcome

    def release(self) -> None:
        """Tells it."""
        told(self._world, self._outcome)


def _close(world: World, store: Store | None, leaving: Leaving) -> None:
    leaving.close()
    if store is None or threading.current_thread().name == THREAD:  # which cannot wait for its own end
        return
    outcome = store.close()
    if outcome is not None and outcome.error is not None:
        world.register(_Failed(world, outcome), keep_alive=True)
