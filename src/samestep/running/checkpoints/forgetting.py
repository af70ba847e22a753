"""Whether a script forgets `commit()`: its optimizers step, and no step is ever ended.

Then nothing can be saved within an epoch, and no step is counted, without a word. Epochs that only evaluate step no
optimizer, and a script that names no data has nothing to end: they are not warned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from samestep.launch.warning import warn
from samestep.running.checkpoints.every import Every

__all__: list[str] = []

_NEVER = (
    "an epoch is over and commit() was never called: nothing was saved in it, and a resume repeats it. Call "
    "state.commit() after every optimizer.step()"
)
_NOT_IN_EPOCH = (
    "an epoch is over in which the optimizer stepped and commit() was not called: its steps are not counted, and a run "
    "that is asked to make room cannot save before the epoch ends. Call state.commit() after every optimizer.step()"
)


class Habit:
    """Watches over the epochs of a script.

    Args:
        every: when it wants to be saved.
        named: what is; the optimizers among them tell when they step.
        has_data: whether data are.
    """

    def __init__(self, every: Every, named: Mapping[str, Any], *, has_data: bool) -> None:
        self._wants_steps = every.steps is not None or every.seconds is not None
        self._has_data = has_data
        self._began = 0
        self._stepped = False
        for thing in named.values():
            if isinstance(thing, Optimizer):
                thing.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def begin_epoch(self, step: int) -> None:
        """An epoch begins, after so many committed steps."""
        self._began, self._stepped = step, False

    def end_epoch(self, step: int) -> None:
        """It ends after so many; warns where the script seems to have forgotten them."""
        if step == 0 and self._wants_steps:
            warn(_NEVER)
        elif step == self._began and self._has_data and self._stepped:
            warn(_NOT_IN_EPOCH)
