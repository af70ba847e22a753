"""Whether a run that failed is worth another attempt.

torchrun restarts as often as it was told, and never looks at what failed: a step that fails for good fails K times,
each time after the whole way there.
"""

from __future__ import annotations

from samestep.launch.verdict import RunResult

__all__: list[str] = []

SAME_STEP = 3  # failures of one step in a row after which it is held to be the step's own fault
USAGE = 2  # the exit code of what only the caller can fix


class Restarts:
    """Counts attempts.

    Args:
        most: how many restarts are allowed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.done = 0
        self.reason: str | None = None  # why there is no other attempt although some are left
        self._failed_at: list[int] = []

    def another(self, verdict: RunResult) -> bool:
        """Takes note of how an attempt has ended; returns whether another one follows."""
        if verdict.exit_code == 0 or verdict.blamed is None or verdict.interrupted is not None:
            return False
        self._failed_at.append(verdict.step)
        recent = self._failed_at[-SAME_STEP:]
        if self.done >= self.most:
            return False
        if verdict.blamed.exit_code == USAGE and verdict.blamed.usage:
            self.reason = "no restart: this error must be fixed first"
        elif len(recent) == SAME_STEP and len(set(recent)) == 1:
            place = f"after step {verdict.step}" if verdict.step else "before the first step"
            self.reason = f"not started again: {SAME_STEP} attempts in a row have failed {place}"
        else:
            self.done += 1
        return self.reason is None

    def withdraw(self, reason: str | None) -> None:
        """Takes back that another attempt follows."""
        self.done -= 1
        self.reason = reason
