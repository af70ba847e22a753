"""Messages of a collective as arrays: who sends which blocks to whom at once, and how often that comes.

A buffer is cut into equal blocks. Message i of the t-th repetition of a round carries the blocks
[begin(t)[i], begin(t)[i] + width[i]) from sources[i] to targets[i], which adds them to its own or replaces its own.

A ring over 100,000 ranks has 2 x 10^10 messages; here it is two rounds of 100,000 messages each, with a repeat.
Plans (:mod:`samestep.collectives.plan`) are expanded from such rounds, and prices (:mod:`samestep.network.pricing`)
computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy import bool_, float64, int64
from numpy.typing import NDArray

Ints = NDArray[int64]
Floats = NDArray[float64]
Bools = NDArray[bool_]


@dataclass(frozen=True, eq=False)
class MessageRound:
    """Messages that are sent at once, `repeat` times."""

    sources: Ints  # the rank that each comes from
    targets: Ints  # the rank that each goes to
    begin: Callable[[int], Ints]  # the first block of each, by repetition
    width: Any  # blocks of each; one number for all, or an array
    adds: Any  # whether the target adds them, or replaces its own; likewise
    repeat: int = 1  # how often. From the second repetition on, all depend alike on the one before

    def __post_init__(self) -> None:
        for name in ("width", "adds"):
            object.__setattr__(self, name, np.broadcast_to(np.asarray(getattr(self, name)), self.sources.shape))

    def has_ranks_of(self, other: MessageRound) -> bool:
        """Whether the arrays of ranks are the same objects."""
        return self.sources is other.sources and self.targets is other.targets

    def reversed(self, *, adds: bool) -> MessageRound:
        """Returns the round run backwards: targets send to sources, the last repetition first."""
        last = self.repeat - 1
        return replace(
            self, sources=self.targets, targets=self.sources, begin=lambda t: self.begin(last - t), adds=adds
        )

    def remapped(self, members: Ints, offset: Ints, scale: int) -> MessageRound:
        """Returns the round with rank i played by `members[g, i]` in every group g, on blocks of its own."""
        groups = len(members)
        return replace(
            self,
            sources=members[:, self.sources].ravel(),
            targets=members[:, self.targets].ravel(),
            begin=lambda t: (offset[:, None] + self.begin(t) * scale).ravel(),
            width=np.tile(self.width, groups) * scale,
            adds=np.tile(self.adds, groups),
        )


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Every rank of a group is sent its own block by all others, or sends it to all others, at once.

    Kept as a rule, because p ranks exchange p (p - 1) messages.
    """

    members: Ints  # `members[g, i]` is rank i of group g
    offset: Ints  # the first block of each group
    scale: int  # blocks of each rank
    adds: bool  # each rank is sent its own block, and adds it; or it sends its own block, which replaces the others'
    repeat: int = 1

    @property
    def group(self) -> int:
        return int(self.members.shape[1])

    def reversed(self, *, adds: bool) -> AllToAll:
        return replace(self, adds=adds)

    def remapped(self, members: Ints, offset: Ints, scale: int) -> AllToAll:
        return AllToAll(
            members[:, self.members].reshape(-1, self.group),
            (offset[:, None] + self.offset * scale).ravel(),
            self.scale * scale,
            self.adds,
        )

    def shifts(self, distances: Sequence[int]) -> tuple[Ints, Ints]:
        """Returns sources and targets of the messages to the members that are so far on."""
        on = (np.arange(self.group) + np.array(distances, dtype=np.int64)[:, None]) % self.group
        sources = np.broadcast_to(self.members[:, None, :], (len(self.members), len(distances), self.group))
        return sources.ravel(), self.members[:, on].ravel()

    def expanded(self) -> MessageRound:
        """Returns all messages, by the rank whose block they carry."""
        home, other = (each.ravel() for each in np.nonzero(~np.eye(self.group, dtype=bool)))
        one = send(home, other, home, adds=self.adds)
        if self.adds:
            one = replace(one, sources=one.targets, targets=one.sources)
        return one.remapped(self.members, self.offset, self.scale)


Messages = MessageRound | AllToAll


class Rounds(Protocol):
    """A collective over `ranks` ranks and a buffer of `blocks` equal blocks, such as a plan."""

    @property
    def ranks(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def make_rounds(self) -> Callable[[], Iterable[Messages]]: ...


def send(sources: Any, targets: Any, begin: Any = 0, width: Any = 1, *, adds: Any = False) -> MessageRound:
    """Returns a round of fixed messages.

    >>> send([0, 1], [1, 2], begin=[4, 5]).begin(0).tolist()
    [4, 5]
    """
    sources, targets = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    blocks = np.broadcast_to(np.asarray(begin, dtype=np.int64), sources.shape)
    return MessageRound(sources, targets, lambda _: blocks, width, adds)


def reverse(rounds: Iterable[Messages], *, adds: bool = True) -> list[Messages]:
    """Returns the rounds from last to first, every message going the other way.

    What handed one rank's blocks to all others now brings theirs together on it, in the same time.
    """
    return [one.reversed(adds=adds) for one in reversed(list(rounds))]


def remap(rounds: Iterable[Messages], members: Any, offset: Any = 0, scale: int = 1) -> Iterator[Messages]:
    """Yields the rounds, played by every row of `members` at once.

    Args:
        rounds: over as many ranks as a row has members.
        members: `members[g, i]` plays rank i in group g; one group may be given as a single row.
        offset: block b of group g becomes the blocks from `offset[g] + b * scale` on.
        scale: as many blocks as each becomes.
    """
    rows = np.atleast_2d(np.asarray(members, dtype=np.int64))
    first = np.broadcast_to(np.asarray(offset, dtype=np.int64), len(rows))
    known: list[tuple[MessageRound, MessageRound]] = []  # the last two: those of a double tree come in turn
    for one in rounds:
        if isinstance(one, AllToAll):
            yield one.remapped(rows, first, scale)
            continue
        mapped = one.remapped(rows, first, scale)
        done = next((after for before, after in known if before.has_ranks_of(one)), None)
        if done is None:
            known = [*known[-1:], (one, mapped)]
        else:
            mapped = replace(mapped, sources=done.sources, targets=done.targets)  # the same objects, priced once
        yield mapped


def with_root(rounds: Iterable[Messages], ranks: int, root: int) -> Iterator[Messages]:
    """Yields the rounds with rank 0 played by `root`, and every other by the rank as far behind it."""
    return remap(rounds, (np.arange(ranks) + root) % ranks)
