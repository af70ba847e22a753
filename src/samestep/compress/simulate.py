"""All ranks of a scheme in one process: what it gives, and how many bytes each would send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.compress.schemes import AllGather, AllToAll, Scheme

__all__: list[str] = []


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        means: of each rank.
        sent: bytes that each rank sends to others.
    """

    means: list[Tensor]
    sent: list[int]


def run(schemes: Sequence[Scheme]) -> Outcome:
    """Runs the schemes of all ranks, message by message."""
    size = len(schemes)
    messages = [next(scheme) for scheme in schemes]
    sent = [0] * size
    while True:
        for rank, message in enumerate(messages):
            sent[rank] += bytes_sent(message, rank, size)
        arrived = [_arrived(messages, rank) for rank in range(size)]
        ends = []
        for rank, scheme in enumerate(schemes):
            try:
                messages[rank] = scheme.send(arrived[rank])
            except StopIteration as end:
                ends.append(end.value)
        if ends:
            assert len(ends) == size, "some ranks are done, and others send"
            return Outcome(ends, sent)


def bytes_sent(message: AllToAll | AllGather, rank: int, size: int) -> int:
    """Returns how many bytes of a message leave the rank."""
    if isinstance(message, AllGather):
        return message.packets.nbytes * (size - 1)
    return message.packets.nbytes - message.counts[rank] * message.packets.shape[1]


def _arrived(messages: Sequence[AllToAll | AllGather], rank: int) -> Tensor:
    parts = []
    for message in messages:
        if isinstance(message, AllToAll):
            parts.append(message.packets.split_with_sizes(list(message.counts))[rank])
        else:
            parts.append(message.packets)
    return torch.stack(parts)
