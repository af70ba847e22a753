"""A collective as a plan of pure integers: which rank sends which blocks to which, and in which round.

A buffer is cut into blocks, the same on every rank. In a round, ranks send ranges of blocks to each other; the rank
that receives one adds it to its own, or puts it in its place:

    Transfer(source=1, target=2, begin=0, end=3, adds=True)

                 block 0   block 1   block 2   block 3
        rank 1   ███████   ███████   ███████                  as they are when the round begins
                    ▼         ▼         ▼
        rank 2   += ▒▒▒▒   += ▒▒▒▒   += ▒▒▒▒                  whatever else it does in this round

Three rules make a plan mean one thing, whatever executes it:

  1. What is sent is what was there when the round began.
  2. Several transfers added to one block in one round are added in the order of their sources.
  3. A rank never replaces a block in a round in which it also sends it, adds to it, or replaces it a second time.

:func:`execute` and :mod:`samestep.collectives.engine` execute a plan, :mod:`samestep.collectives.proof` proves it and
:mod:`samestep.network.pricing` prices it. An algorithm states its rounds as arrays (:mod:`samestep.network.messages`);
transfers are made from them when somebody asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from samestep.errors import UsageError
from samestep.network.messages import AllToAll, Messages, send
from samestep.topology import cut_evenly

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]


class Transfer(NamedTuple):
    """Blocks [begin, end) from `source` to `target`, which adds them to its own or puts them in their place."""

    source: int
    target: int
    begin: int
    end: int
    adds: bool = False


Round = tuple[Transfer, ...]
Rounds = tuple[Round, ...]


class RankRound(NamedTuple):
    """What one rank does in one round; transfers received stand in the order of their sources."""

    sends: Round = ()
    receives: Round = ()


@dataclass(frozen=True)
class Plan:
    """One collective over so many ranks.

    Attributes:
        name: of the algorithm.
        operation: what it computes. Rank r of a reduce-scatter ends with, and of an all-gather begins with, its
            share: the blocks [r m, (r + 1) m), where m = blocks / ranks.
        ranks: how many take part.
        blocks: that the buffer is cut into.
        make_rounds: makes the rounds as arrays, anew at each call.
        root: the rank that a broadcast comes from or a reduce goes to.

    Raises:
        UsageError: no such ranks, root, operation or blocks.
    """

    name: str
    operation: Operation
    ranks: int
    blocks: int
    make_rounds: Callable[[], Iterable[Messages]]
    root: int = 0

    @classmethod
    def from_transfers(
        cls, name: str, operation: Operation, ranks: int, blocks: int, rounds: Rounds, root: int = 0
    ) -> Plan:
        """Returns the plan of rounds that are given transfer by transfer.

        Raises:
            UsageError: the plan breaks a rule; names the round.

        Example:
            >>> rounds = ((Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True)),)
            >>> Plan.from_transfers("pair", "all_reduce", 2, 1, rounds).blocks
            1
        """
        plan = cls(name, operation, ranks, blocks, lambda: map(_of_transfers, rounds), root)
        _ = plan.rounds  # which checks them
        return plan

    def __post_init__(self) -> None:
        check_ranks(self.ranks, self.root)
        if self.operation not in get_args(Operation):
            raise UsageError(f"{self.name}: there is no operation {self.operation!r}: {', '.join(get_args(Operation))}")
        if self.blocks < 1:
            raise UsageError(f"{self.name}: a buffer cannot be cut into {self.blocks} blocks: give 1 or more")
        if self.operation in {"reduce_scatter", "all_gather"} and self.blocks % self.ranks:
            raise UsageError(
                f"{self.name}: {self.blocks} blocks are not the same number for each of {self.ranks} ranks"
            )

    @cached_property
    def rounds(self) -> Rounds:
        """The rounds, transfer by transfer.

        Raises:
            UsageError: one breaks a rule; names it.
        """
        rounds = tuple(transfers for one in self.make_rounds() for transfers in _to_transfers(one))
        for number, transfers in enumerate(rounds):
            problem = self._problem(transfers)
            if problem:
                raise UsageError(f"{self.name}, round {number}: {problem}")
        return rounds

    def _problem(self, transfers: Round) -> str:
        incoming: dict[int, list[Transfer]] = defaultdict(list)
        outgoing: dict[int, list[Transfer]] = defaultdict(list)
        for one in transfers:
            inside = 0 <= one.source < self.ranks and 0 <= one.target < self.ranks
            if not inside or one.source == one.target or not 0 <= one.begin < one.end <= self.blocks:
                return f"{one} is not from one of {self.ranks} ranks to another, of one of {self.blocks} blocks or more"
            incoming[one.target].append(one)
            outgoing[one.source].append(one)
        for rank, received in incoming.items():
            clash = _clash(received)
            if clash:
                return f"rank {rank} cannot take both {clash[0]} and {clash[1]}: one would undo the other"
            for one in received:
                if not one.adds and any(each.begin < one.end and one.begin < each.end for each in outgoing[rank]):
                    return f"rank {rank} sends blocks that {one} replaces in the same round"
        return ""

    def of_rank(self, rank: int) -> tuple[RankRound, ...]:
        """Returns what one rank does, round by round.

        >>> pair = Plan.from_transfers("pair", "broadcast", 2, 1, ((Transfer(0, 1, 0, 1),),))
        >>> pair.of_rank(0)[0].sends, pair.of_rank(1)[0].sends
        ((Transfer(source=0, target=1, begin=0, end=1, adds=False),), ())
        """
        return self._parts[rank]

    @cached_property
    def _parts(self) -> list[tuple[RankRound, ...]]:
        parts: list[list[RankRound]] = [[] for _ in range(self.ranks)]
        for transfers in self.rounds:
            sends: list[list[Transfer]] = [[] for _ in range(self.ranks)]
            receives: list[list[Transfer]] = [[] for _ in range(self.ranks)]
            for one in sorted(transfers):
                sends[one.source].append(one)
                receives[one.target].append(one)
            for rank in range(self.ranks):
                parts[rank].append(RankRound(tuple(sends[rank]), tuple(receives[rank])))
        return [tuple(of_rank) for of_rank in parts]

    def edges(self, elements: int) -> list[int]:
        """Returns where the blocks of a buffer begin, and the end of the last; a block may be empty.

        >>> Plan("nothing", "all_reduce", 1, 4, list).edges(6)
        [0, 2, 4, 5, 6]
        """
        return [0, *(stop for _, stop in cut_evenly(elements, self.blocks))]

    def share(self, rank: int) -> tuple[int, int]:
        """Returns the blocks [begin, end) that are `rank`'s in a reduce-scatter or an all-gather."""
        each = self.blocks // self.ranks
        return rank * each, (rank + 1) * each

    def held(self, rank: int) -> range:
        """Returns the blocks of which `rank` holds the result at the end."""
        if self.operation == "reduce_scatter":
            return range(*self.share(rank))
        return range(self.blocks if self.operation != "reduce" or rank == self.root else 0)


def _to_transfers(one: Messages) -> Iterator[Round]:
    """Yields the transfers of each repetition."""
    each = one.expanded() if isinstance(one, AllToAll) else one
    sources, targets, adds = each.sources.tolist(), each.targets.tolist(), each.adds.tolist()
    for repetition in range(each.repeat):
        begin = each.begin(repetition)
        spans = zip(sources, targets, begin.tolist(), (begin + each.width).tolist(), adds, strict=True)
        yield tuple(Transfer(*span) for span in spans)


def _of_transfers(transfers: Round) -> Messages:
    table = zip(*transfers, strict=True) if transfers else ((), (), (), (), ())
    sources, targets, begin, end, adds = (np.array(column, dtype=np.int64) for column in table)
    return send(sources, targets, begin, end - begin, adds=adds.astype(bool))


def _clash(received: Sequence[Transfer]) -> tuple[Transfer, Transfer] | None:
    """Two transfers to one rank that share a block, unless both add to it and come from different ranks."""
    furthest: dict[int | str, Transfer] = {}  # of those before, the one that ends last: by source, that replace, of all
    for one in sorted(received, key=lambda each: each.begin):
        rivals = [one.source, "replaces"] if one.adds else ["all"]
        for key in rivals:
            if key in furthest and one.begin < furthest[key].end:
                return furthest[key], one
        for key in (one.source, "all") if one.adds else (one.source, "all", "replaces"):
            if key not in furthest or furthest[key].end < one.end:
                furthest[key] = one
    return None


def execute(plan: Plan, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Executes a plan in the simplest way, on anything that can be added; the oracle of everything else.

    Args:
        plan: the rounds.
        values: `values[rank][block]`.

    Returns:
        The same table, afterwards.

    Example:
        >>> rounds = ((Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True)),)
        >>> pair = Plan.from_transfers("pair", "all_reduce", 2, 1, rounds)
        >>> execute(pair, [["a"], ["b"]])
        [['ab'], ['ba']]
    """
    table = [list(row) for row in values]
    for transfers in plan.rounds:
        before = [(one, table[one.source][one.begin : one.end]) for one in sorted(transfers)]
        for one, blocks in before:
            mine = table[one.target]
            for at, block in enumerate(blocks, start=one.begin):
                mine[at] = mine[at] + block if one.adds else block
    return table


def check_ranks(ranks: int, root: int = 0) -> None:
    """Refuses a number of ranks below 1, and a root that is none of them."""
    if ranks < 1:
        raise UsageError(f"a collective over {ranks} ranks: give 1 or more")
    if not 0 <= root < ranks:
        raise UsageError(f"rank {root} cannot be the root of {ranks} ranks: give one of 0 to {ranks - 1}")
