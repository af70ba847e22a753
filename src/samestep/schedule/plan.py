"""The schedule of a pipeline as a plan of pure integers: which rank does what, and in which order.

A model is cut into stages, a batch into micro-batches. For each stage and micro-batch there is a forward and a
backward, which may be done in two parts: the gradients of the stage's inputs, which the stage before waits for, and
those of its weights, for which nobody does:

    F  forward          needs F of the stage before                        gives the activations for the stage behind
    B  backward         needs F of its own, and B or I of the stage behind gives the gradients for the stage before
    I  its inputs' part likewise                                           likewise
    W  its weights'     needs I of its own                                 gives nothing to others

    rank 0    F0  F1  ──  ──  B0  B1          stage 0        two stages on two ranks, two micro-batches
    rank 1    ──  F0  F1  B0  B1  ──          stage 1

What is sent follows from it: whatever a stage on another rank needs, as soon as it is there, without waiting for
whoever takes it. Four rules make a plan right, and one that breaks them cannot be made:

  1. Every stage does the forward of every micro-batch once; and its backward once, whole or in both parts, unless the
     plan has forwards only.
  2. Each rank does what belongs to its own stages.
  3. A stage adds up gradients (B or W) in the order of the micro-batches, so that they have the bits of one process
     that takes one micro-batch after another.
  4. Nobody waits for ever: some order of all that is done has everything behind what it needs.

torch.distributed.pipelining mixes the order with its execution, and tests schedules by running them; its 1F1B order,
which its pictures show, forwards a micro-batch that is not there (torch 2.13, last rank, 3 micro-batches).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from samestep.errors import UsageError

__all__: list[str] = []

Kind = Literal["F", "B", "I", "W"]
BACKWARDS = ("B", "I")  # what the stage before waits for
ADDS = ("B", "W")  # what adds to the gradients of weights


class Action(NamedTuple):
    """What a stage does for one micro-batch.

    >>> str(Action("F", 1, 3))
    'F1.3'
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


Order = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in one step.

    Attributes:
        name: of the schedule.
        micro_batches: of a step.
        placement: by stage, the rank that holds it.
        orders: by rank, what it does, one after another.

    Raises:
        UsageError: the plan breaks a rule; says where.

    Example:
        >>> plan = Schedule("by hand", 1, (0, 1), ((Action("F", 0, 0), Action("B", 0, 0)), (
        ...     Action("F", 1, 0), Action("B", 1, 0))))
        >>> [str(action) for _, action in plan.in_time]
        ['F0.0', 'F1.0', 'B1.0', 'B0.0']
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]
    orders: tuple[Order, ...]

    def __post_init__(self) -> None:
        problem = self._shape() or self._incomplete() or self._disordered() or self._stuck()
        if problem:
            raise UsageError(f"{self.name}: {problem}")

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """How many hold stages."""
        return len(self.orders)

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return any(action.kind != "F" for order in self.orders for action in order)

    @cached_property
    def splits(self) -> frozenset[tuple[int, int]]:
        """Stages and micro-batches whose backward is done in two parts."""
        return frozenset((one.stage, one.micro_batch) for order in self.orders for one in order if one.kind == "W")

    def needs(self, action: Action) -> Iterator[Action]:
        """Yields what must be done before: on this rank or on another."""
        kind, stage, micro_batch = action
        if kind == "F" and stage > 0:
            yield Action("F", stage - 1, micro_batch)
        elif kind in BACKWARDS:
            yield Action("F", stage, micro_batch)
            if stage + 1 < self.stages:
                yield Action(self._backward(stage + 1, micro_batch), stage + 1, micro_batch)
        elif kind == "W":
            yield Action("I", stage, micro_batch)

    def taker(self, action: Action) -> int | None:
        """Returns the rank that needs what an action gives; None where no other stage does."""
        stage = action.stage + {"F": 1, "B": -1, "I": -1, "W": self.stages}[action.kind]
        return self.placement[stage] if 0 <= stage < self.stages else None

    def taken(self, action: Action) -> int:
        """Returns how many messages of other ranks an action needs."""
        own = self.placement[action.stage]
        return sum(self.placement[one.stage] != own for one in self.needs(action))

    def given(self, action: Action) -> int:
        """Returns how many messages it makes for other ranks."""
        return int(self.taker(action) not in {None, self.placement[action.stage]})

    def _backward(self, stage: int, micro_batch: int) -> Kind:
        return "I" if (stage, micro_batch) in self.splits else "B"

    @cached_property
    def in_time(self) -> tuple[tuple[int, Action], ...]:
        """Rank and action of all that is done, each behind what it needs: as if all took equally long.

        One process that drives all ranks issues it in this order.
        """
        return tuple(pair for issued in self.rounds for pair in issued)

    @cached_property
    def rounds(self) -> tuple[tuple[tuple[int, Action], ...], ...]:
        """The same in rounds: of each rank the next action, if what it needs was done in the rounds before."""
        return tuple(self._rounds())

    def _rounds(self) -> Iterator[tuple[tuple[int, Action], ...]]:
        done: set[Action] = set()
        places = [0] * self.ranks
        while True:
            ready = tuple(
                (rank, self.orders[rank][place])
                for rank, place in enumerate(places)
                if self._is_next(rank, place, done)
            )
            if not ready:
                return
            yield ready
            for rank, action in ready:
                done.add(action)
                places[rank] += 1

    def _is_next(self, rank: int, place: int, done: set[Action]) -> bool:
        return place < len(self.orders[rank]) and all(one in done for one in self.needs(self.orders[rank][place]))

    def most_held(self, rank: int, stage: int | None = None) -> int:
        """Returns how many micro-batches' activations a rank holds at once, at most.

        Held from the forward to the end of the backward.

        Args:
            rank: whose.
            stage: of which stage; of all its stages together if None.
        """
        held = most = 0
        for action in self.orders[rank]:
            if stage is not None and action.stage != stage:
                continue
            held += (action.kind == "F") - (action.kind in ADDS)
            most = max(most, held)
        return most if self.trains else 1

    # --- the rules ---

    def _shape(self) -> str:
        if self.micro_batches < 1:
            return f"a step cannot have {self.micro_batches} micro-batches: give 1 or more"
        if not self.orders or sorted(set(self.placement)) != list(range(self.ranks)):
            return f"{self.ranks} ranks hold the stages {self.placement}: every rank must hold one, and none else may"
        return ""

    def _incomplete(self) -> str:
        """Rules 1 and 2."""
        counts = Counter(action for order in self.orders for action in order)
        if twice := next((action for action, count in counts.items() if count > 1), None):
            return f"{twice} is done {counts[twice]} times"
        for rank, order in enumerate(self.orders):
            for action in order:
                if not (0 <= action.stage < self.stages and 0 <= action.micro_batch < self.micro_batches):
                    return f"rank {rank} does {action}, and there is no such stage or micro-batch"
                if self.placement[action.stage] != rank:
                    return f"rank {rank} does {action}, and the stage is on rank {self.placement[action.stage]}"
        for stage in range(self.stages):
            for micro_batch in range(self.micro_batches):
                kinds = "".join(kind for kind in get_args(Kind) if counts[Action(kind, stage, micro_batch)])
                if kinds not in ({"FB", "FIW"} if self.trains else {"F"}):
                    return f"of stage {stage} and micro-batch {micro_batch} there is {kinds or 'nothing'}"
        return ""

    def _disordered(self) -> str:
        """Rule 3."""
        for stage, rank in enumerate(self.placement):
            added = [one.micro_batch for one in self.orders[rank] if one.stage == stage and one.kind in ADDS]
            if added != sorted(added):
                return f"stage {stage} adds up the gradients of the micro-batches in the order {added}"
        return ""

    def _stuck(self) -> str:
        """Rule 4."""
        if len(self.in_time) == sum(map(len, self.orders)):
            return ""
        done = {action for _, action in self.in_time}
        stuck = [(rank, one) for rank, order in enumerate(self.orders) for one in order if one not in done]
        heads = [next(pair for pair in stuck if pair[0] == rank) for rank in sorted({rank for rank, _ in stuck})]
        told = [(rank, one, missing) for rank, one in heads for missing in self.needs(one) if missing not in done]
        rank, one, missing = min(told, key=lambda each: self.placement[each[2].stage] != each[0])  # its own fault first
        return f"rank {rank} waits in {one} for {missing}, which is never done: the ranks wait for each other"


def check_sizes(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> None:
    """Refuses what no schedule can be made of.

    Raises:
        UsageError: a number is below 1.
    """
    for what, count in (("ranks", ranks), ("micro-batches", micro_batches), ("stages a rank", chunks)):
        if count < 1:
            raise UsageError(f"{name}: a pipeline cannot have {count} {what}: give 1 or more")


def straight(ranks: int) -> tuple[int, ...]:
    """Returns the placement of one stage a rank."""
    return tuple(range(ranks))


def actions(kind: Kind, stage: int, micro_batches: Sequence[int]) -> Order:
    """Returns one stage's actions of one kind."""
    return tuple(Action(kind, stage, micro_batch) for micro_batch in micro_batches)
