"""Whether a step whose values were not kept has other gradients than in one process.

The norms of all gradients are known at every step. Between two steps at which the script alone gets the ranks'
parameters, norms come apart little by little, by rounding. A sudden difference tells which step is to be compared.
"""

from __future__ import annotations

import math

from samestep.verification.journal import Event
from samestep.verification.judging.record import Record

_LEAST = 1e-6  # of the gradient's norm: rounding
_FAR = 1e-3  # of it, what is looked into
_SUDDEN = 30  # times as far apart as at any step before


def sudden(record: Record, alone: Record) -> Event | None:
    """Returns the first step, of those whose values were not kept, with norms suddenly apart from one process's."""
    if not record.ranks or not alone.ranks:
        return None
    told = {event["event"]: event.get("norms") for event in alone.ranks[0].of("rates")}
    usual = _LEAST
    for step in record.ranks[0].steps[: record.steps]:
        ours, theirs = record.norms(step), told.get(step["event"])
        if not ours or not theirs or any((ours | theirs)[name] for name in ours.keys() ^ theirs.keys()):
            continue  # an average may make zeros of no gradient, and nothing else
        total = math.hypot(*theirs.values())
        apart = max(abs(ours[name] - theirs[name]) for name in ours.keys() & theirs.keys()) / total if total else 0.0
        if not math.isfinite(apart):
            return None
        if step["kept"] is None and apart > max(_FAR, _SUDDEN * usual):
            return step
        usual = max(usual, apart)
    return None
