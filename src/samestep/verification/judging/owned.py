"""Whether optimizers that ranks hold for themselves step as those of one process, which holds all of them.

Clients of a federation, members of a population, or workers with an inner optimizer, are dealt out over the ranks.
Nothing averages their gradients, and nothing should.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestep.verification.journal import Event
from samestep.verification.judging.own_pace import have_gradients_of
from samestep.verification.judging.record import Rank, Record

_FEWEST = 2  # steps of an optimizer: the second one shows what the first has made

Steps = Sequence[Event]


def are_held(record: Record) -> bool:
    """Returns whether ranks hold optimizers that no other rank steps with the same gradients."""
    return len(record.ranks) > 1 and not (record.is_by_hand or record.is_cut) and bool(_parted(record)[1])


def holds_more(alone: Record, record: Record) -> bool:
    """Returns whether one process steps more optimizers than any rank."""
    held = max(len([*_optimizers(rank)]) for rank in record.ranks)
    return any(len([*_optimizers(rank)]) > held for rank in alone.ranks)


def count(record: Record, alone: Record) -> int:
    """Returns how many optimizers the ranks hold for themselves, where all step as those of one process.

    Those that step alike on all ranks are compared, too. 0 where ranks hold none for themselves, or where they step
    otherwise: each is compared with an optimizer of one process of its own, by its rates and the norms of its
    gradients. It takes as many steps, and one process has no further optimizers, unless the ranks' recording was cut.
    Or ranks take the steps of its one optimizer in turn.

    Args:
        record: of the ranks.
        alone: of one process at its own pace.
    """
    common, owned = _parted(record)
    left = [steps for rank in alone.ranks for steps in _optimizers(rank)]
    if max(map(len, owned), default=0) < _FEWEST:
        return 0
    if not common and len(left) == 1 and _take_turns(owned, left[0], is_cut=record.is_cut_short):
        return len(owned)
    for steps in sorted((*common, *owned), key=len, reverse=True):
        as_many = [place for place, other in enumerate(left) if record.is_cut_short or len(other) == len(steps)]
        place = next((place for place in as_many if _are_taken(steps, left[place])), None)
        if place is None:
            return 0
        del left[place]
    return len(owned) if record.is_cut_short or not left else 0


def _take_turns(owned: Sequence[Steps], whole: Steps, *, is_cut: bool) -> bool:
    """Whether each step of one process is taken by one rank, and each rank takes some: a model is sent around, say."""
    taken = [0] * len(owned)
    for place, other in enumerate(whole):
        following = [(own, steps[taken[own]]) for own, steps in enumerate(owned) if taken[own] < len(steps)]
        rank = next((own for own, step in following if have_gradients_of(step, other, place)), None)
        if rank is None:
            return is_cut and len(following) < len(owned) and all(taken)
        taken[rank] += 1
    return all(taken) and all(count == len(steps) or is_cut for count, steps in zip(taken, owned, strict=True))


def _parted(record: Record) -> tuple[list[Steps], list[Steps]]:
    """The optimizers that step with the same gradients on all ranks, once, and those of single ranks."""
    ranks = [[*_optimizers(rank)] for rank in record.ranks]
    common = [steps for steps in ranks[0] if all(any(_are_equal(steps, one) for one in other) for other in ranks[1:])]
    return common, [one for theirs in ranks for one in theirs if not any(_are_equal(one, steps) for steps in common)]


def _optimizers(rank: Rank) -> Iterator[Steps]:
    """Yields the steps of each optimizer of a process."""
    for number in dict.fromkeys(step["optimizer"] for step in rank.steps):
        yield [step for step in rank.steps if step["optimizer"] == number]


def _are_equal(steps: Steps, other: Steps) -> bool:
    """Whether these have the same gradients, as far as both ranks were recorded."""
    return all(one["gradients"] == two["gradients"] for one, two in zip(steps, other, strict=False))


def _are_taken(steps: Steps, other: Steps) -> bool:
    return all(have_gradients_of(one, two, place) for place, (one, two) in enumerate(zip(steps, other, strict=False)))
