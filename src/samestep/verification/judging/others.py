"""The further runs that a comparison may ask for, each made only where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samestep.verification.journal import Event
from samestep.verification.judging.record import Record, Run


@dataclass(frozen=True)
class Others:
    """Further runs of the script alone, made where they are needed.

    Attributes:
        permuted: with the samples of each batch in another order.
        of_ranks: with what each rank used, for itself.
        unclipped: with what each rank used, for itself, and its gradients before clipping.
        in_turn: with samples of its own, a step for each of the ranks', from what a step of the ranks begins with; with
            its gradients before clipping.
        own_draws: with what it draws by itself.
        redrawn: with what the ranks have drawn handed out in other ways: joined as samples[rank::world_size] cuts it,
            and, where one process has as many micro-batches as all ranks together, one rank's after the other's.
        twice: with what each rank used, for itself, and each sample twice.
        merged: with all samples of a step in place of each of its micro-batches, at these steps.
        apart: as it is, keeping what adds up in these steps.
        at_step: with what each rank used at this step, and with all samples before it.
        own_lengths: as it is, with DataLoaders as long as they are in one process.
        own_pace: recorded as one process at its own pace, for N times as many steps.
        of_group: with what some ranks used, and the further runs of the script on that.
        in_float64: the ranks, the script alone, and this with its samples in another order, all in float64.
    """

    permuted: Callable[[], Run]
    of_ranks: Callable[[], list[Run]]
    unclipped: Callable[[], list[Run]] | None = None
    merged: Callable[[list[Event]], Run] | None = None
    apart: Callable[[list[Event]], Run] | None = None
    at_step: Callable[[Event], list[Run]] | None = None
    own_lengths: Callable[[], Run] | None = None
    own_pace: Callable[[], Record] | None = None
    of_group: Callable[[list[int]], tuple[Run, Others]] | None = None
    in_float64: Callable[[], tuple[Record, Run, Run]] | None = None
    in_turn: Callable[[], Run] | None = None
    twice: Callable[[], list[Run]] | None = None
    own_draws: Callable[[], Run] | None = None
    redrawn: Sequence[Callable[[], Run]] = ()
