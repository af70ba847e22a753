"""The schedules by the names that users give them, each with its picture and what it costs.

p ranks, m micro-batches; f and b are the seconds of a stage's forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain

from samestep.errors import UsageError
from samestep.schedule.schedule import Action, Actions, Kind, Schedule, actions
from samestep.topology import cut_evenly


def fill_drain(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (GPipe).

        rank 0   F0  F1  F2  F3  ──  ──  B0  B1  B2  B3
        rank 1   ──  F0  F1  F2  F3  B0  B1  B2  B3  ──

    Every rank holds the activations of all micro-batches. A step takes Σ(f + b) + (m - 1)(max f + max b), exactly,
    however unequal the stages are. Source: Y. Huang et al., "GPipe", NeurIPS 2019.

    >>> [str(action) for action in fill_drain(2, 2).rank_actions[1]]
    ['F1.0', 'F1.1', 'B1.0', 'B1.1']
    """
    every = range(micro_batches)
    rank_actions = tuple(actions("F", stage, every) + actions("B", stage, every) for stage in range(ranks))
    return Schedule("fill-drain", micro_batches, tuple(range(ranks)), rank_actions)


def one_f_one_b(ranks: int, micro_batches: int, *, eager: bool = False) -> Schedule:
    """A backward as soon as it is possible, and a forward after it (1F1B).

        rank 0   F0  F1  ──  B0  F2  B1  F3  B2  ──  B3          warm-up: 2 forwards, then one backward, one forward
        rank 1   ──  F0  B0  F1  B1  F2  B2  F3  B3              warm-up: 1

    As quick as fill and drain where stages are equal, at most Σ(f + b) + (m - 1) max(f + b) where they are not; rank
    r holds p - r micro-batches instead of all m.

    Each rank receives just before it needs the message, so with messages of c seconds 1F1B loses about
    2c(p - 1)m / p. `eager` has a warm-up of 2(p - 1 - r) + 1 forwards, so that there is another micro-batch to do while
    a message travels; 2(p - 1)c remain, as with fill and drain, and rank 0 holds 2p - 1 micro-batches.

    Sources: A. Harlap et al., "PipeDream", 2018; D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
    Training", ICML 2021.

    >>> schedule = one_f_one_b(4, 8)
    >>> [schedule.peak_in_flight(rank) for rank in range(4)]
    [4, 3, 2, 1]
    >>> schedule = one_f_one_b(4, 8, eager=True)
    >>> [schedule.peak_in_flight(rank) for rank in range(4)]
    [7, 5, 3, 1]
    """
    name = "eager-1f1b" if eager else "1f1b"

    def of_stage(stage: int) -> Actions:
        warm_up = min(2 * (ranks - 1 - stage) + 1 if eager else ranks - stage, micro_batches)
        pairs = zip(range(micro_batches), range(warm_up, micro_batches), strict=False)
        steady = chain.from_iterable((Action("B", stage, back), Action("F", stage, on)) for back, on in pairs)
        left = range(micro_batches - warm_up, micro_batches)
        return (*actions("F", stage, range(warm_up)), *steady, *actions("B", stage, left))

    return Schedule(name, micro_batches, tuple(range(ranks)), tuple(map(of_stage, range(ranks))))


def interleaved(ranks: int, micro_batches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Several stages a rank, assigned in turn: while one waits for its neighbours, another has work.

        stage     0   1   2   3                     p = 2 ranks, v = 2 stages each
        rank      0   1   0   1

        rank 0   F0.0  F0.1  F2.0  F2.1  ──    B2.0  B2.1  B0.0  B0.1
        rank 1   ──    F1.0  F1.1  F3.0  B3.0  F3.1  B3.1  B1.0  B1.1

    Micro-batches pass in groups of p or more: a group through a rank's first stage, then through its second, and so on.
    The idle time shrinks to a v-th, (p - 1)(f + b) / v with f and b a rank's whole work, for v times as many messages.

    Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021. It needs micro-batches in multiples of p; here groups may be larger, and of different sizes.

    >>> interleaved(2, 4).placement
    (0, 1, 0, 1)
    """
    groups = cut_evenly(micro_batches, max(1, micro_batches // ranks))
    largest = max(end - begin for begin, end in groups)

    def of_rank(rank: int) -> Actions:
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards = [Action("F", stage, one) for group in groups for stage in stages for one in range(*group)]
        backwards = [Action("B", stage, one) for group in groups for stage in stages[::-1] for one in range(*group)]
        warm_up = min(2 * (ranks - rank - 1) + (stages_per_rank - 1) * largest, len(forwards))
        steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
        return (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])

    placement = tuple(stage % ranks for stage in range(ranks * stages_per_rank))
    return Schedule("interleaved", micro_batches, placement, tuple(map(of_rank, range(ranks))))


def zero_bubble(ranks: int, micro_batches: int) -> Schedule:
    """Backwards in two parts, so that a rank that would wait computes gradients of weights instead.

        rank 0   F0  F1  ──  I0  F2  I1  W0  F3  I2  W1  …          I: for the stage before
        rank 1   ──  F0  I0  F1  I1  W0  F2  …                      W: for the optimizer, any time

    With f, i and w seconds for the three, the idle time shrinks from (p - 1)(f + i + w) to (p - 1)(f + i - w). It is
    never zero within a step: the name is of steps that overlap, and of optimizers that can undo a step.

    The order is found by simulation with actions of equal length. At each moment rank r does the first of these that is
    possible, and holds at most p micro-batches, as many as the first rank does in 1F1B:

        1  F, while fewer than p - r of its micro-batches are between forward and backward
        2  I
        3  W

    Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (its ZB-H1).

    >>> schedule = zero_bubble(4, 8)
    >>> [schedule.peak_in_flight(rank) for rank in range(4)]
    [4, 4, 4, 4]
    """
    rank_actions: list[list[Action]] = [[] for _ in range(ranks)]
    done: list[Counter[Kind]] = [Counter() for _ in range(ranks)]  # by rank, how many actions of each kind
    while any(own["W"] < micro_batches for own in done):
        chosen = [_next_kind(rank, done, micro_batches) for rank in range(ranks)]  # by the state before this moment
        for rank, kind in enumerate(chosen):
            if kind is not None:
                rank_actions[rank].append(Action(kind, rank, done[rank][kind]))
                done[rank][kind] += 1
    return Schedule("zero-bubble", micro_batches, tuple(range(ranks)), tuple(map(tuple, rank_actions)))


def _next_kind(rank: int, done: list[Counter[Kind]], micro_batches: int) -> Kind | None:
    ranks, own = len(done), done[rank]
    received = done[rank - 1]["F"] if rank else micro_batches
    returned = done[rank + 1]["I"] if rank + 1 < ranks else own["F"]
    if own["F"] < received and own["F"] - own["I"] < ranks - rank and own["F"] - own["W"] < ranks:
        return "F"
    if own["I"] < min(returned, own["F"]):
        return "I"
    return "W" if own["W"] < own["I"] else None


def forward_only(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """An evaluation: every stage takes one micro-batch after another.

        rank 0   F0  F1  F2  F3
        rank 1       F0  F1  F2  F3

    With several stages a rank, all micro-batches pass its first stage, then all its second.

    >>> len(forward_only(3, 4).topological_order)
    12
    """
    stages = ranks * stages_per_rank
    rank_actions = [
        sum((actions("F", stage, range(micro_batches)) for stage in range(rank, stages, ranks)), ())
        for rank in range(ranks)
    ]
    placement = tuple(stage % ranks for stage in range(stages))
    return Schedule("forward only", micro_batches, placement, tuple(rank_actions))


ONE_STAGE_PER_RANK: dict[str, Callable[[int, int], Schedule]] = {
    "fill-drain": fill_drain,
    "1f1b": one_f_one_b,
    "eager-1f1b": partial(one_f_one_b, eager=True),
    "zero-bubble": zero_bubble,
}
SCHEDULE_NAMES = (*ONE_STAGE_PER_RANK, "interleaved")


def make_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Returns a schedule by its name; only "interleaved" has several stages a rank.

    Raises:
        UsageError: there is no such schedule, or not of so many.

    Example:
        >>> make_schedule("1f1b", 2, 4).name
        '1f1b'
    """
    if name not in SCHEDULE_NAMES:
        raise UsageError(f"there is no schedule {name!r}: {', '.join(SCHEDULE_NAMES)}")
    for what, count in (("ranks", ranks), ("micro-batches", micro_batches), ("stages a rank", stages_per_rank)):
        if count < 1:
            raise UsageError(f"{name}: a pipeline cannot have {count} {what}: give 1 or more")
    if name == "interleaved":
        return interleaved(ranks, micro_batches, stages_per_rank=stages_per_rank)
    if stages_per_rank != 1:
        raise UsageError(f"{name} has one stage a rank; {stages_per_rank} are for 'interleaved'")
    return ONE_STAGE_PER_RANK[name](ranks, micro_batches)
