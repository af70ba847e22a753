"""Which passes over the data were ended early, and what a script has come to behind them."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.text import plural
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record, pass_of

_KINDS = {  # event -> what it is a sign of
    **dict.fromkeys(("evaluated", "ran", "metrics"), "evaluation"),
    "save": "save",
    "resumed": "resume",
}


def remarks(record: Record) -> list[str]:
    """Says which passes were ended early, and for what."""
    ranks = [list(_cuts(rank)) for rank in record.ranks]
    if not ranks or not ranks[0]:
        return []
    event, _ = ranks[0][0]
    length = next((one["length"] for one in record.ranks[0].of("pass") if pass_of(one) == pass_of(event)), None)
    of = "" if length is None else f" of {length:,}"
    batches = f"{event['cut']:,}{of} {'batch' if event['cut'] == 1 and not of else 'batches'}"
    found = {kind for cuts in ranks for _, kinds in cuts for kind in kinds}
    kinds = [kind for kind in dict.fromkeys(_KINDS.values()) if kind in found]
    purpose = f"to reach the {' and the '.join(kinds)}" if kinds else "and no evaluation, save or resume came behind it"
    more = len(ranks[0]) - 1
    later = f"; so {'was' if more == 1 else 'were'} {plural(more, 'later pass')}, after a step" if more else ""
    return [f"the pass was ended after {batches} {purpose}{later}"]


def _cuts(rank: Rank) -> Iterator[tuple[Event, set[str]]]:
    """Yields the ends of passes that were ended early, and what came between each and the next step."""
    end: Event | None = None
    kinds: set[str] = set()
    for event in rank.events:
        if event["kind"] == "passed" and event.get("cut") is not None:
            if end is not None:
                yield end, kinds
            end, kinds = event, set()
        elif event["kind"] in _KINDS:
            kinds.add(_KINDS[event["kind"]])
    if end is not None:
        yield end, kinds


def are_alike(record: Record) -> bool:
    """Returns whether all ranks have ended the same passes, so that each takes them for over, as one process does.

    One that fails or waits behind an end comes to fewer.
    """
    ranks = [[pass_of(event) for event, _ in _cuts(rank)] for rank in record.ranks]
    most = max(ranks, key=len, default=[])
    return all(passes == most[: len(passes)] and (passes or not most) for passes in ranks)


def is_cut(record: Record) -> bool:
    """Returns whether a rank has ended a pass early."""
    return any(next(_cuts(rank), None) is not None for rank in record.ranks)
