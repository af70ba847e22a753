"""Chunks on their way through a scheme, one behind another: while one travels, the next is encoded.

    thread 0    encode 0   encode 1   encode 2
    group 0         ~~~ 0 ~~~  ~~~ 1 ~~~  ~~~ 2 ~~~                      a message to each: its share
    thread 1                  add 0      add 1      add 2
    group 1                       ~~~ 0 ~~~  ~~~ 1 ~~~  ~~~ 2 ~~~        a message to all
    thread 2                                decode 0   decode 1   decode 2

Each round of messages has a process group and a thread of its own, so each group carries chunk after chunk, in the same
order on all ranks, however fast each rank's threads are. Backward goes on meanwhile. On a GPU there are no threads:
what is issued waits there for what it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from samestep.compress.schemes import AllGather, AllToAll, Scheme
from samestep.compress.simulate import bytes_sent
from samestep.runtime.axes import Axis
from samestep.runtime.neighbours import new_group
from samestep.runtime.worker import WorkerThread

__all__: list[str] = []

Done = Callable[[Tensor | Exception], None]


class Line:
    """The rounds of messages among the ranks of an axis.

    Collective: every rank of the axis must make it.

    Args:
        axis: the ranks.
        rounds: of messages.
        threads: whether each round has a thread; else all is done by the thread that sends.
    """

    def __init__(self, axis: Axis, rounds: int, *, threads: bool) -> None:
        timeout = timedelta(seconds=axis.timeout_s)
        self._axis = axis
        self._groups = [new_group(axis.ranks, timeout) for _ in range(rounds)]
        self._workers = [WorkerThread(f"compresses {number}") for number in range(rounds + 1)] if threads else []
        self._sent = [0] * rounds  # by each thread's own

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others."""
        return sum(self._sent)

    def send(self, scheme: Scheme, done: Done) -> None:
        """Sends a chunk off; `done` gets its mean, or what went wrong, maybe in another thread."""
        self._do(0, lambda: self._go_on(scheme, 0, None, done))

    def _do(self, number: int, act: Callable[[], None]) -> None:
        self._workers[number].add(act) if self._workers else act()

    def _go_on(self, scheme: Scheme, number: int, arriving: _Arriving | None, done: Done) -> None:
        try:
            message = next(scheme) if arriving is None else scheme.send(arriving.wait())
            arriving = self._issue(number, message)
        except StopIteration as end:
            done(end.value)
        except Exception as error:  # noqa: BLE001  (the thread that waits raises it)
            done(error)
        else:
            self._do(number + 1, functools.partial(self._go_on, scheme, number + 1, arriving, done))

    def _issue(self, number: int, message: AllToAll | AllGather) -> _Arriving:
        group: Any = self._groups[number]
        size, packets = self._axis.size, message.packets
        self._sent[number] += bytes_sent(message, self._axis.rank, size)
        rows = message.counts[self._axis.rank] if isinstance(message, AllToAll) else len(packets)
        arrived = torch.empty(size, rows, packets.shape[1], dtype=torch.uint8, device=packets.device)
        flat = packets.view(-1)
        if isinstance(message, AllGather):
            return _Arriving(arrived, group._allgather_base(arrived.view(-1), flat), packets)  # noqa: SLF001
        sent = [count * packets.shape[1] for count in message.counts]
        received = [rows * packets.shape[1]] * size
        return _Arriving(arrived, group.alltoall_base(arrived.view(-1), flat, received, sent), packets)

    def close(self) -> None:
        """Ends the threads when they have done what they were given."""
        for worker in self._workers:
            worker.close()


class _Arriving:
    """A message under way.

    Args:
        tensor: where it arrives.
        work: that brings it.
        sent: must live until then.
    """

    def __init__(self, tensor: Tensor, work: Any, sent: Tensor) -> None:
        self._tensor, self._work, self._sent = tensor, work, sent

    def wait(self) -> Tensor:
        """Returns it, once it is there."""
        self._work.wait()
        return self._tensor
