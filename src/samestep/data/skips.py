"""Samples that were left out because they cannot be loaded: told to all ranks, kept until their step is committed.

A rank alone knows which of its samples were bad. How many there were on all ranks arrives with the weight of the step,
so every rank knows, without another message, whether there is anything to tell; only then do they tell each other:

    step k       rank 0: 4 samples     rank 1: 3 samples, 1 bad       weight 7, skipped 1: on both             [1]
                 rank 0: nothing       rank 1: (position, index, reason)                  gathered, on both    [2]
"""

from __future__ import annotations

import sys

from samestep.data.ledger import Skip
from samestep.data.order import StepPartition
from samestep.errors import DataError
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.world import World

__all__: list[str] = []

MOST_SAID = 10  # skipped samples that standard error names; the ledger has all


class Skips:
    """The skipped samples of steps that are not yet committed, the same on every rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._said = 0
        self._of_step: dict[int, tuple[Skip, ...]] = {}  # finished steps, by their first position

    def exchange(self, epoch: int, step: StepPartition, mine: list[Skip], batch_size: int) -> tuple[Skip, ...]:
        """Returns what all ranks skipped in a step, in the order's order: [2]. Collective.

        Raises:
            DataError: nothing is left of a whole step.
        """
        rows = [(skip.position, skip.index, skip.reason) for skip in mine]
        everyone = [Skip(*row) for rows in all_gather_json(self._world.data, rows) for row in rows]
        found = tuple(sorted(everyone, key=lambda skip: skip.position))
        if len(found) == step.size == batch_size > 1:
            raise DataError(
                f"all {step.size} samples of a step are bad, which is the dataset and not a sample; the first is "
                f"sample {found[0].index}: {found[0].reason}"
            )
        self._say(epoch, found)
        return found

    def _say(self, epoch: int, found: tuple[Skip, ...]) -> None:
        for skip in found:
            self._said += 1
            if self._world.is_first and self._said <= MOST_SAID:
                rest = "; more will only be recorded" if self._said == MOST_SAID else ""
                line = f"samestep: skips sample {skip.index} in epoch {epoch}: {skip.reason}{rest}\n"
                sys.stderr.write(line)

    def note(self, step: StepPartition, skipped: tuple[Skip, ...]) -> None:
        """Keeps what a finished step has skipped."""
        if skipped:
            self._of_step[step.start] = skipped

    def take(self, start: int) -> tuple[Skip, ...]:
        """Returns what the step that starts there has skipped; it is committed now."""
        return self._of_step.pop(start, ())

    def discard(self) -> None:
        """Forgets steps that will not be committed."""
        self._of_step.clear()
