"""Where a recording ends: counted in optimizer steps and batches alone, which are the same on all ranks and machines.

Behind the last steps, each pass that fed one is ended early, to reach what stands behind it: an evaluation, a save, a
resume. A script that reads no pass, or reads on with another one, is ended behind the last of these steps.
"""

from __future__ import annotations

from collections import Counter

STEPS = 64  # that are recorded if nobody asks for others
LONGER = 4  # times as many of a script without a DataLoader, which has no pass that could be ended
SMALL = 1_000_000  # parameters of a model that is recorded for so long
PASSES = 3  # that are ended early: one for an evaluation, one for a save, one for a resume

Pass = tuple[str, int]  # key and number


class Limit:
    """Counts for one rank.

    Args:
        steps: after so many steps of an optimizer nothing more is asked for; None where the script ends by itself.
        passes: so many passes are ended early before the rank is.

    Attributes:
        fed: the passes whose batches the last step has used.
        reached: the steps of an optimizer that has taken as many as are asked for; 0 until then. One that begins
            behind it (in a part of the script that resumes) goes on counting there.
    """

    def __init__(self, steps: int | None, passes: int = 0) -> None:
        self._steps = steps
        self._passes = passes
        self.fed: list[Pass] = []
        self.reached = 0
        self._yielded: Counter[Pass] = Counter()
        self._window: Counter[Pass] = Counter()  # those since the last step
        self._each: Counter[tuple[str, bool]] = Counter()  # key, and whether a pass's first -> most batches of a step
        self._ending: set[Pass] = set()

    def yielded(self, name: Pass) -> None:
        self._yielded[name] += 1
        self._window[name] += 1

    def ends(self, name: Pass) -> bool:
        """Whether a pass is over where its next batch is asked for: not within the batches of one step."""
        each = self._each[name[0], False] or self._each[name[0], True]
        return name in self._ending and self._yielded[name] % each == 0

    def stepped(self, taken: int) -> bool:
        """Whether the rank ends here, where an optimizer has taken so many steps."""
        for name, count in self._window.items():
            is_first = self._yielded[name] == count  # what is loaded ahead is among its batches
            self._each[name[0], is_first] = max(self._each[name[0], is_first], count)
        self.fed = list(self._window)
        self._window.clear()
        if self._steps is None or taken < self._steps:
            return False
        self._ending.update(self.fed)
        self.reached = max(self.reached, taken)
        return taken >= self._steps + self._passes
