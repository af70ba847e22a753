"""Whose gradients are not finite: the ranks tell each other, and all come to the same sentence.

Only a rank that has found something asks, and all find the same, since averaged gradients are alike. One that finds
something alone would wait for ever: its gradients were changed after the average, and on it alone. So it waits for a
while, and then says just that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from samestep.replicas.local_gradients import Bad, LocalGradients
from samestep.runtime.axes import Axis

__all__: list[str] = []

PATIENCE_S = 30.0  # for the other ranks to come to their optimizer's step, too
_MOST_NAME = 400  # characters of a name in it

_SINCE = {
    True: ": what its loss gave back was not finite, either",
    False: ": its loss gave back finite numbers",
    None: "",
}


@dataclass(frozen=True)
class Blame:
    """Where bad gradients come from.

    Attributes:
        text: a sentence.
        ranks: those that brought them; empty where they are not known.
    """

    text: str
    ranks: tuple[int, ...]


def find_blame(bad: Sequence[Bad], local: LocalGradients | None, axis: Axis, subject: str) -> Blame:
    """Returns who brought these averaged gradients, in the order of a backward. Collective over the ranks they are of.

    Args:
        bad: at least one.
        local: what this rank brought; None where there is nobody else.
        axis: the ranks that averaged.
        subject: what the ranks talk about: of which model, and for the how many-th time.
    """
    here = axis.ranks[axis.rank]
    if local is None or axis.control is None:
        return Blame(f"the gradient of {bad[0]}{_and_more(bad)}", (here,))
    try:
        told = _exchange(axis, subject, _findings(local))
    except RuntimeError:  # the store's, for a rank that is silent or gone
        text = (
            f"the gradient of {bad[0]}{_and_more(bad)} on rank {here}, and within {PATIENCE_S:g} s no other rank found "
            "the same: it was changed on this rank alone, after it was averaged"
        )
        return Blame(text, (here,))
    return _judged(bad, dict(zip(axis.ranks, told, strict=True)), seen=local.is_thorough or not bad[0].is_large)


def _judged(bad: Sequence[Bad], told: dict[int, dict[str, Any]], *, seen: bool) -> Blame:
    own = {rank: one for rank, one in told.items() if one["bad"] is not None}
    if not own:
        why = (
            "those of each rank were finite, so it was changed after they were averaged"
            if seen
            else "its rank is not known: of large tensors, nonfinite='stop' tells it"
        )
        return Blame(f"the gradient of {bad[0]}{_and_more(bad)} on all ranks; {why}", ())
    sure = min(one["doubt"] for one in own.values())
    ranks = tuple(rank for rank, one in own.items() if one["doubt"] == sure)
    first = own[ranks[0]]
    others = f" (and of ranks {', '.join(map(str, ranks[1:]))})" if len(ranks) > 1 else ""
    since = _SINCE[first["arrived"]]
    count = f"{len(bad)} tensor{'s' if len(bad) > 1 else ''}"
    text = f"rank {ranks[0]}'s{others} gradient of {first['bad']}{since}. Averaged, {count} had it on all ranks"
    return Blame(text, ranks)


def _and_more(bad: Sequence[Bad]) -> str:
    return f", and {len(bad) - 1} more tensors are like it" if len(bad) > 1 else ""


def _findings(local: LocalGradients) -> dict[str, Any]:
    bad, doubt = local.first_bad()
    text = None if bad is None else f"{bad.name[:_MOST_NAME]} {bad.state}"
    return {"bad": text, "doubt": doubt, "arrived": local.arrived_bad()}


def _exchange(axis: Axis, subject: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every rank's findings.

    Through the store on which the ranks met, and not through a group: where one is alone with its finding, the others
    go on, and their next collective would take its letter for an answer.
    """
    store = _get_default_store()
    names = [f"samestep/nonfinite/{axis.ranks[0]}/{subject}/{rank}" for rank in axis.ranks]
    store.set(names[axis.rank], json.dumps(mine))
    store.wait(names, timedelta(seconds=PATIENCE_S))
    return [json.loads(store.get(name)) for name in names]
