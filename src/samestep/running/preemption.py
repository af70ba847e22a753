"""Makes room when asked: every rank saves the same step, and leaves with exit code 75.

    SIGTERM or SIGUSR1, to any one rank      schedulers send them to some processes of a job, or to all
    the launcher's order, to every rank      over the control pipe (samestep.launch.control)
                     |
                     v
    wish "stop", with the report of the step that ends next  ->  agreed: all save after the step behind it, and leave

A handler that saved where the signal found it would save different steps on different ranks, or wait for a peer that
does not save. Workers of a DataLoader inherit the handler by fork; there it does nothing, so that a signal to the
whole group does not end them before the last save. A second signal changes nothing either: Slurm sends SIGTERM twice
before SIGKILL.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from samestep.launch import orders
from samestep.runtime.step import StepState

__all__: list[str] = []

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Passes requests to make room on to all ranks. Its step state must listen.

    Attributes:
        number: the signal that asked, here or at the launcher; None where no rank or another one was asked.
    """

    def __init__(self, step: StepState) -> None:
        self._step = step
        self._process = os.getpid()
        self.number: int | None = None
        self._taken: list[int] = []
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:  # the script's own handler knows better
                    signal.signal(number, self._signalled)
                    self._taken.append(number)
        orders.when_preempted(self._ask)

    def _signalled(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (the signature of handlers)
        if os.getpid() == self._process:
            self._ask(number)

    def _ask(self, number: int) -> None:
        if self.number is None:
            self.number = number
            self._step.wish("stop")

    def close(self) -> None:
        """Gives the signals back."""
        if os.getpid() == self._process:
            orders.when_preempted(None)
        if threading.current_thread() is threading.main_thread():
            for number in self._taken:
                signal.signal(number, signal.SIG_DFL)
        self._taken.clear()
