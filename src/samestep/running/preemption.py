"""Makes room when asked: every rank saves the same step, and leaves with exit code 75.

    SIGTERM or SIGUSR1, to any one rank      schedulers send them to some processes of a job, or to all
    the launcher's order, to every rank      over the control pipe (samestep.launch.control)
                     |
                     v
    request "stop", with the report of the step that ends next  ->  agreed: all save after the step behind it, and leave

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
from samestep.runtime.step_state import StepState

__all__: list[str] = []

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Passes requests to make room on to all ranks. Its step state must listen.

    There may be several, one of each checkpoint: all of them are asked, and the last to close gives the signals back.

    Attributes:
        number: the signal that asked, here or at the launcher; None where no rank or another one was asked.
    """

    def __init__(self, step: StepState) -> None:
        self._step = step
        self._process = os.getpid()
        self.number: int | None = None
        _live.append(self)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:  # the script's own handler knows better
                    signal.signal(number, _signalled)
        orders.when_preempted(_ask_all)

    def ask(self, number: int) -> None:
        """Wishes that all ranks leave, if nobody has asked before."""
        if self.is_of_this_process and self.number is None:
            self.number = number
            self._step.request("stop")

    def close(self) -> None:
        """Hears no more; more than once does no harm."""
        if self not in _live:
            return
        _live.remove(self)
        if not any(other.is_of_this_process for other in _live):
            _give_back()

    @property
    def is_of_this_process(self) -> bool:
        """Whether it is no copy that a fork has made."""
        return self._process == os.getpid()


_live: list[Preemption] = []


def _ask_all(number: int) -> None:
    for preemption in tuple(_live):
        preemption.ask(number)


def _signalled(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (the signature of handlers)
    if _live:
        _ask_all(number)
        return
    signal.signal(number, signal.SIG_DFL)  # the last was closed on another thread, which may not give signals back
    signal.raise_signal(number)


def _give_back() -> None:
    orders.when_preempted(None)
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is _signalled:
                signal.signal(number, signal.SIG_DFL)
