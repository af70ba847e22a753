"""Whether ranks that draw the same order of samples go on doing so, where the script has no DataLoader.

Until they diverge, the ranks together use the samples of one process, and others afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from samestep.verification.findings import Finding
from samestep.verification.judging.record import Rank, Record, model_inputs, place_of_draw

_BEFORE = 2  # steps, at least, in which the ranks draw alike


def judge(record: Record, own_pace: Callable[[], Record] | None) -> Iterator[Finding]:
    """Yields the first draw that is one of all ranks until a step, and not from there on, if it chooses the samples.

    Args:
        record: of ranks whose samples no DataLoader tells.
        own_pace: records one process at its own pace.
    """
    found = _first_apart(record.ranks)
    if found is None or own_pace is None or not record.is_alike:
        return
    window, where, rank = found
    alone, until, behind = own_pace().ranks, range(window), range(window, record.steps)
    used = model_inputs(record.ranks, until)
    if not used or used != model_inputs(alone, until):
        return
    if model_inputs(record.ranks, behind) != model_inputs(alone, behind):
        yield Finding(
            code="samples-repeated",
            rank=rank,
            step=next((step["event"] for step in record.ranks[0].steps if step["window"] == window), None),
            where=where,
            cause=f"until step {window} all ranks draw the same numbers here, and together use the samples of one "
            f"process; then rank {rank} draws others than rank 0: some samples are used twice, and others never",
            fix="draw what only some ranks need from a generator of its own: torch.Generator().manual_seed(…)",
        )


def _first_apart(ranks: Sequence[Rank]) -> tuple[int, str, int] | None:
    """The window and line of the first draw that ranks no longer share, and the first rank that draws another."""
    draws = [_draws(rank) for rank in ranks]
    shared: set[str] = set()  # lines at which all ranks drew the same
    apart: set[str] = set()
    for place in sorted(set(draws[0]).intersection(*draws[1:])) if draws else ():
        window, where, _ = place
        pairs = zip(ranks, draws, strict=True)
        other = next((rank.number for rank, theirs in pairs if theirs[place] != draws[0][place]), None)
        if other is None:
            shared.add(where)
        elif where in shared - apart and window >= _BEFORE:
            return window, where, other
        else:
            apart.add(where)
    return None


def _draws(rank: Rank) -> dict[tuple[int, str, str], str]:
    """Window, line and number of each draw -> what was drawn."""
    draws = [draw for draw in rank.of("draw") if draw["digest"] is not None]
    return {(*place_of_draw(draw), draw["place"].rpartition("|")[2]): draw["digest"] for draw in draws}
