"""The schedule of a pipeline: which rank does what, and in which order, as pure integers.

A model is cut into stages, a batch into micro-batches. Each stage has a forward and a backward for each micro-batch;
the backward may be split in two, the gradients of the stage's inputs and those of its weights:

    F  forward           needs F of the stage before                              gives activations to the next stage
    B  backward          needs F of the same stage, and B or I of the next one    gives gradients to the stage before
    I  backward, inputs  the same                                                 the same
    W  backward, weights needs I of the same stage                                gives nothing

    rank 0    F0  F1  ──  ──  B0  B1          stage 0        two stages on two ranks, two micro-batches
    rank 1    ──  F0  F1  B0  B1  ──          stage 1

The messages follow from it: each result that a stage on another rank needs is sent as soon as it is there.
A schedule that breaks one of four rules cannot be made:

  1. Every stage does the forward of every micro-batch once, and its backward once, whole or in both parts, unless the
     schedule has forwards only.
  2. Each rank does the actions of its own stages.
  3. A stage adds gradients (B or W) in the order of the micro-batches, so that their bits are those of one process
     that takes one micro-batch after another.
  4. No rank waits for ever: there is an order of all actions in which each comes after its dependencies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from samestep.errors import UsageError

Kind = Literal["F", "B", "I", "W"]
BACKWARDS = ("B", "I")  # what the stage before waits for
ACCUMULATES = ("B", "W")  # what adds to the gradients of weights


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


Actions = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in one step.

    Raises:
        UsageError: the schedule breaks a rule; says where.

    Example:
        >>> schedule = Schedule("by hand", 1, (0, 1), ((Action("F", 0, 0), Action("B", 0, 0)), (
        ...     Action("F", 1, 0), Action("B", 1, 0))))
        >>> [str(action) for _, action in schedule.topological_order]
        ['F0.0', 'F1.0', 'B1.0', 'B0.0']
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]  # by stage, the rank that holds it
    rank_actions: tuple[Actions, ...]  # by rank, its actions, one after another

    def __post_init__(self) -> None:
        problem = self._bad_shape() or self._incomplete() or self._bad_sum_order() or self._deadlock()
        if problem:
            raise UsageError(f"{self.name}: {problem}")

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return len(self.rank_actions)

    @cached_property
    def trains(self) -> bool:
        return any(action.kind != "F" for actions in self.rank_actions for action in actions)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """Stages and micro-batches whose backward is done in two parts."""
        return frozenset(
            (one.stage, one.micro_batch) for actions in self.rank_actions for one in actions if one.kind == "W"
        )

    def dependencies(self, action: Action) -> Iterator[Action]:
        """Yields what must be done before, on this rank or on another."""
        kind, stage, micro_batch = action
        if kind == "F" and stage > 0:
            yield Action("F", stage - 1, micro_batch)
        elif kind in BACKWARDS:
            yield Action("F", stage, micro_batch)
            if stage + 1 < self.stages:
                backward: Kind = "I" if (stage + 1, micro_batch) in self.split_backwards else "B"
                yield Action(backward, stage + 1, micro_batch)
        elif kind == "W":
            yield Action("I", stage, micro_batch)

    def receiver_rank(self, action: Action) -> int | None:
        """Returns the rank that needs an action's result; None where no other stage does."""
        stage = action.stage + {"F": 1, "B": -1, "I": -1, "W": self.stages}[action.kind]
        return self.placement[stage] if 0 <= stage < self.stages else None

    def num_receives(self, action: Action) -> int:
        """Returns how many messages of other ranks an action needs."""
        own = self.placement[action.stage]
        return sum(self.placement[one.stage] != own for one in self.dependencies(action))

    def num_sends(self, action: Action) -> int:
        """Returns how many messages to other ranks an action makes."""
        return int(self.receiver_rank(action) not in {None, self.placement[action.stage]})

    @cached_property
    def topological_order(self) -> tuple[tuple[int, Action], ...]:
        """Rank and action of all that is done, each after its dependencies."""
        return tuple(pair for issued in self.rounds for pair in issued)

    @cached_property
    def rounds(self) -> tuple[tuple[tuple[int, Action], ...], ...]:
        """The same in rounds: each rank's next action, if its dependencies were done in the rounds before."""
        found: list[tuple[tuple[int, Action], ...]] = []
        done: set[Action] = set()
        places = [0] * self.ranks
        while ready := tuple(
            (rank, actions[place])
            for rank, (place, actions) in enumerate(zip(places, self.rank_actions, strict=True))
            if place < len(actions) and all(one in done for one in self.dependencies(actions[place]))
        ):
            found.append(ready)
            for rank, action in ready:
                done.add(action)
                places[rank] += 1
        return tuple(found)

    def peak_in_flight(self, rank: int, stage: int | None = None) -> int:
        """Returns the largest number of micro-batches whose activations a rank holds at once.

        They are held from the forward to the end of the backward.

        Of one stage, or of all stages of the rank together.
        """
        held = peak = 0
        for action in self.rank_actions[rank]:
            if stage is None or action.stage == stage:
                held += (action.kind == "F") - (action.kind in ACCUMULATES)
                peak = max(peak, held)
        return peak if self.trains else 1

    # --- the rules ---

    def _bad_shape(self) -> str:
        if self.micro_batches < 1:
            return f"a step cannot have {self.micro_batches} micro-batches: give 1 or more"
        if not self.rank_actions or sorted(set(self.placement)) != list(range(self.ranks)):
            return f"{self.ranks} ranks hold the stages {self.placement}: every rank must hold one, and none else may"
        return ""

    def _incomplete(self) -> str:
        """Rules 1 and 2."""
        counts = Counter(action for actions in self.rank_actions for action in actions)
        if twice := next((action for action, count in counts.items() if count > 1), None):
            return f"{twice} is done {counts[twice]} times"
        for rank, actions in enumerate(self.rank_actions):
            for action in actions:
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

    def _bad_sum_order(self) -> str:
        """Rule 3."""
        for stage, rank in enumerate(self.placement):
            added = [
                one.micro_batch for one in self.rank_actions[rank] if one.stage == stage and one.kind in ACCUMULATES
            ]
            if added != sorted(added):
                return f"stage {stage} adds up the gradients of the micro-batches in the order {added}"
        return ""

    def _deadlock(self) -> str:
        """Rule 4."""
        done = {action for _, action in self.topological_order}
        blocked = [
            (rank, next(one for one in actions if one not in done))
            for rank, actions in enumerate(self.rank_actions)
            if not done.issuperset(actions)
        ]
        missing = [(rank, one, need) for rank, one in blocked for need in self.dependencies(one) if need not in done]
        if not missing:
            return ""
        # a rank that waits for itself is named before ranks that wait for it
        rank, one, need = min(missing, key=lambda each: self.placement[each[2].stage] != each[0])
        return f"rank {rank} waits in {one} for {need}, which is never done: the ranks wait for each other"


def actions(kind: Kind, stage: int, micro_batches: Sequence[int]) -> Actions:
    return tuple(Action(kind, stage, micro_batch) for micro_batch in micro_batches)
