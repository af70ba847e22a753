"""Waiting until MPI is done: in it, or looking from time to time.

    blocking    MPI's own blocking call, on a thread of the group: its quickest way, and it burns a core meanwhile
    polling     the call that returns at once, then a look now and then: often at first, ever more seldom later

MPI libraries wait by spinning. Where each rank has a core that nothing else wants that is right; where ranks share
cores, the one that spins keeps the one from working that it waits for, and a step takes twice as long as over gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.errors import PeerError

__all__: list[str] = []

SPINS_S = 50e-6  # looks without a pause, letting others have the core in between
SHORTEST_S = 20e-6
LONGEST_S = 1e-3
ASKING_S = 0.2  # between looks for ranks that have left


@dataclass
class Waiting:
    """How the calls of one communicator wait.

    Attributes:
        blocking: in MPI itself.
        timeout_s: how long a call may take.
        check: raises PeerError where a rank has left that the call needs.
    """

    blocking: bool
    timeout_s: float
    check: Callable[[], None]

    def within(self, seconds: float) -> Waiting:
        """Returns the same with another timeout."""
        return Waiting(blocking=self.blocking, timeout_s=seconds, check=self.check)

    def until_done(self, requests: Sequence[Any]) -> None:
        """Returns when all requests are done.

        Raises:
            PeerError: a rank has left, or they took longer than `timeout_s`.
        """
        only = requests[0]
        self.until(only.Test if len(requests) == 1 else lambda: type(only).Testall(requests))

    def until(self, done: Callable[[], bool]) -> None:
        """Returns when `done()` does.

        Raises:
            PeerError: a rank has left, or it took longer than `timeout_s`.
        """
        began = asked = time.monotonic()
        pause = SHORTEST_S
        while not done():
            now = time.monotonic()
            if now - began < SPINS_S:
                os.sched_yield()
                continue
            if now - asked > ASKING_S or now - began > self.timeout_s:
                asked = now
                self.check()
                if now - began > self.timeout_s:
                    raise PeerError(f"waited {now - began:.1f} s for the other ranks")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_S)
