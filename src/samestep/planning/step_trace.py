"""One step of a training as it went: what the process was at, one thing after another, and when gradients were there.

    was at        data │ train │ forward │ backward           │ train │ optimizer │ train      the script's own time
    is called     data │ other │ forward │ backward           │ other │ optimizer │ other
    gradients                              ▲  ▲ ▲    ▲       ▲          as seconds of backward passes, of all of a step

A forward begins where the model is called and ends with the loss, where its backward begins; a call that no backward
follows is none. On a GPU the host only queues work: there the times are those at which the device came by, so that
what the host prepares beside it counts for nothing, and neither has to wait for the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PARTS = ("data", "forward", "backward", "optimizer", "other")
FEWEST = 3  # undisturbed steps that are timed, of which a median is taken
LISTENED = 3  # steps behind them in which gradients are listened to


@dataclass(frozen=True)
class Timestamp:
    ns: int  # nanoseconds of this process's clock
    event: Any = None  # one of CUDA's, once the process uses a GPU

    def until(self, later: Timestamp) -> float:
        """Returns the seconds from here to a later moment; waits for the device to come by.

        >>> Timestamp(1_000).until(Timestamp(2_000))
        1e-06
        """
        if self.event is None or later.event is None:
            return (later.ns - self.ns) / 1e9
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3


def timestamp() -> Timestamp:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return Timestamp(time.perf_counter_ns())
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Timestamp(time.perf_counter_ns(), event)


@dataclass
class StepTrace:
    """A step, as far as it has come."""

    pieces: list[tuple[str, Timestamp]]  # what the process was at, and since when
    ended: Timestamp | None = None  # when the step was over; None before
    passes: int = 0  # backward passes so far
    # by parameter, the backward pass that its gradient was ready in, and when
    ready: dict[int, tuple[int, Timestamp]] = field(default_factory=dict)
    samples: int = 0  # of the step; 0 where nobody has told
    kept: int = 0  # bytes kept from a forward to its backward, of the pass that keeps most; 0 where nobody has counted

    def begin(self, name: str) -> None:
        if self.pieces[-1][0] != name:
            self.pieces.append((name, timestamp()))

    @property
    def seconds(self) -> float:
        return self.pieces[0][1].until(self._end())

    def parts(self) -> dict[str, float]:
        """Returns the seconds of each of PARTS; they add up to the whole."""
        spent = dict.fromkeys(PARTS, 0.0)
        for name, seconds in zip(classify([name for name, _ in self.pieces]), self._spans(), strict=True):
            spent[name] += seconds
        return spent

    def ready_fractions(self) -> dict[int, float]:
        """Returns, by parameter, the part of the step's backward passes that is over when its gradient is ready.

        >>> spans = [("forward", Timestamp(0)), ("backward", Timestamp(10))]
        >>> StepTrace(spans, Timestamp(30), 1, {7: (1, Timestamp(15))}).ready_fractions()
        {7: 0.25}
        """
        spans = self._spans()
        passes = [n for n, (name, _) in enumerate(self.pieces) if name == "backward"]
        whole = sum(spans[n] for n in passes)
        found = {}
        for parameter, (number, at) in self.ready.items():
            if whole and 0 < number <= len(passes):
                before = sum(spans[n] for n in passes[: number - 1])
                within = min(max(0.0, self.pieces[passes[number - 1]][1].until(at)), spans[passes[number - 1]])
                found[parameter] = (before + within) / whole
        return found

    def _spans(self) -> list[float]:
        marks = [at for _, at in self.pieces] + [self._end()]
        return [one.until(other) for one, other in pairwise(marks)]

    def _end(self) -> Timestamp:
        assert self.ended is not None, "a step that is not over has no length"
        return self.ended


def classify(pieces: Sequence[str]) -> list[str]:
    """Returns which of PARTS each piece of a step belongs to.

    Where no model is called, the script's own time before a backward is the forward.

    >>> classify(["train", "data", "train", "forward", "backward", "train", "optimizer"])
    ['other', 'data', 'other', 'forward', 'backward', 'other', 'optimizer']
    >>> classify(["data", "train", "backward", "optimizer", "evaluate"])
    ['data', 'forward', 'backward', 'optimizer', 'other']
    """
    own = "forward" if "forward" in pieces else "train"
    found = []
    for name, behind in zip(pieces, [*pieces[1:], ""], strict=True):
        if name == own:
            found.append("forward" if behind == "backward" else "other")
        else:
            found.append(name if name in PARTS and name != "forward" else "other")
    return found
