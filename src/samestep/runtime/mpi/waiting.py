"""Waiting until MPI is done: in it, or looking from time to time.

    blocking    MPI's own blocking call, on a thread of the group: its quickest way, and it burns a core meanwhile
    polling     the call that returns at once, then a look now and then: often at first, ever more seldom later

MPI libraries wait by spinning. Where each rank has a core that nothing else wants that is right; where ranks share
cores, the one that spins keeps the one from working that it waits for, and a step takes twice as long as over gloo.

Who polls sleeps in between. Yielding would do on an idle machine; beside other work it gives the core away for a whole
slice of milliseconds, whereas a sleeper is woken at once: 4 bytes took 3.7 ms and not 1.1 (gloo: 1.4) with two busy
processes on two cores, Open MPI 4.1.4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samestep.errors import PeerError

__all__: list[str] = []

SPINS_S = 20e-6  # looks without a pause
SHORTEST_S, GROWTH, LONGEST_S = 5e-6, 1.2, 300e-6  # pauses
SHARE = 0.02  # of the time waited so far that a pause may take
LOOK_S = 0.01  # the longest pause of all
ASKING_S = 0.2  # between looks for ranks that have left


def too_late(what: str, seconds: float) -> PeerError:
    """Returns the error of a call that has taken longer than it may.

    >>> too_late("all_reduce (call 17 of this group) for the other ranks", 60.01)
    PeerError('waited 60.0 s in all_reduce (call 17 of this group) for the other ranks; the timeout is over')
    """
    return PeerError(f"waited {seconds:.1f} s in {what}; the timeout is over")


@dataclass
class Waiting:
    """How the calls of one communicator wait.

    Attributes:
        blocking: in MPI itself.
        timeout_s: how long a call may take.
        check: raises PeerError where a rank has left that the call needs.
        what: is waited in, and for whom.
    """

    blocking: bool
    timeout_s: float
    check: Callable[[], None]
    what: str

    def within(self, seconds: float) -> Waiting:
        """Returns the same with another timeout."""
        return replace(self, timeout_s=seconds)

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
                continue
            if now - asked > ASKING_S or now - began > self.timeout_s:
                asked = now
                self.check()
                if now - began > self.timeout_s:
                    raise too_late(self.what, now - began)
            time.sleep(pause)
            pause = min(GROWTH * pause, max(LONGEST_S, min(SHARE * (now - began), LOOK_S)))
