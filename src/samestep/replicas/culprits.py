"""Which ranks brought gradients that are not finite: the ranks exchange what they found.

Only a rank that has found something asks, and all find the same, since averaged gradients are equal. One that finds
something alone would wait for ever: its gradients were changed after the average, and on it alone. So it waits for a
while, and then says just that. Synchronised BatchNorm spreads what is not finite to all ranks, in the forward of what
is behind it and in the backward of what is before it. There the rank is named whose backward met it first; where
several did, the one whose input was bad; and where no input is left to look at, that the rank is not known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from samestep.replicas.local_gradients import LocalGradientLog, NonFiniteTensor
from samestep.runtime.axis import Axis
from samestep.runtime.store_messages import decode_message

TIMEOUT_S = 30.0  # for the other ranks to come to their optimizer's step, too
_MAX_NAME = 400  # characters of a name in it

FINDINGS = (
    {"bad": None},
    {"bad": str, "uncertainty": int, "order": int, "arrived": bool | None, "slices": list[int], "input": str | None},
)
_SINCE = {
    True: ": what its loss gave back was not finite, either",
    False: ": its loss gave back finite numbers",
    None: "",
}


@dataclass(frozen=True)
class Culprits:
    text: str  # a sentence
    ranks: tuple[int, ...]  # those that brought them; empty where they are not known


def find_culprits(
    bad: Sequence[NonFiniteTensor], local: LocalGradientLog | None, axis: Axis, subject: str, *, spreads: bool = False
) -> Culprits:
    """Returns the ranks that brought these averaged gradients, in the order of a backward. Collective.

    `subject` says of which model, and for the how many-th time; `spreads` that it has synchronised BatchNorm.
    """
    here = axis.ranks[axis.rank]
    if local is None or axis.control is None:
        slices = "" if local is None else _in_slices(local.bad_slices())
        return Culprits(f"the gradient of {bad[0]}{slices}{_and_more(bad)}", (here,))
    try:
        findings = _exchange(axis, subject, _findings(local))
    except RuntimeError:  # the store's, for a rank that is silent or gone
        text = (
            f"the gradient of {bad[0]}{_and_more(bad)} on rank {here}, and within {TIMEOUT_S:g} s no other rank found "
            "the same: it was changed on this rank alone, after it was averaged"
        )
        return Culprits(text, (here,))
    seen = local.is_thorough or not bad[0].is_large
    return _decide(bad, dict(zip(axis.ranks, findings, strict=True)), seen=seen, spreads=spreads)


def _decide(
    bad: Sequence[NonFiniteTensor], findings: dict[int, dict[str, Any]], *, seen: bool, spreads: bool
) -> Culprits:
    own = {rank: one for rank, one in findings.items() if one["bad"] is not None}
    if not own:
        why = (
            "those of each rank were finite, so it was changed after they were averaged"
            if seen
            else "its rank is not known: of large tensors, nonfinite='stop' tells it"
        )
        return Culprits(f"the gradient of {bad[0]}{_and_more(bad)} on all ranks; {why}", ())
    sure = min(one["uncertainty"] for one in own.values())
    ranks = tuple(rank for rank, one in own.items() if one["uncertainty"] == sure)
    spread = ""
    if spreads and len(ranks) > 1:
        ranks, spread = _before_batchnorm(ranks, findings)
    first = own[ranks[0]]
    others = " (and rank " + "'s, rank ".join(map(str, ranks[1:])) + "'s)" if len(ranks) > 1 else ""
    what = f"{first['bad']}{_in_slices(first['slices'])}{_SINCE[first['arrived']]}"
    count = f"{len(bad)} tensor{'s' if len(bad) > 1 else ''}"
    return Culprits(
        f"rank {ranks[0]}'s{others} gradient of {what}. {spread}Averaged, {count} had it on all ranks", ranks
    )


def _before_batchnorm(ranks: tuple[int, ...], findings: dict[int, dict[str, Any]]) -> tuple[tuple[int, ...], str]:
    """Returns where among `ranks` it began before synchronised BatchNorm spread it, as far as can be told."""
    earliest = min(findings[rank]["order"] for rank in ranks)
    first = tuple(rank for rank in ranks if findings[rank]["order"] == earliest)
    if len(first) == 1:  # the others have it from a layer below: their backwards came to it later
        return first, "Synchronised BatchNorm carried it to the other ranks. "
    if inputs := [rank for rank in first if findings[rank]["input"] is not None]:
        said = f"Its input {findings[inputs[0]]['input']}, which synchronised BatchNorm carried to the other ranks. "
        return tuple(inputs), said
    return first, "Synchronised BatchNorm carries it from one rank to all, so where it began is not known. "


def _in_slices(slices: Sequence[int]) -> str:
    """Says which virtual ranks' samples it came with, where there are any."""
    if not slices:
        return ""
    return f", in the slice{'s' if len(slices) > 1 else ''} of virtual rank {', '.join(map(str, slices))}"


def _and_more(bad: Sequence[NonFiniteTensor]) -> str:
    return f", and {len(bad) - 1} more tensors are like it" if len(bad) > 1 else ""


def _findings(local: LocalGradientLog) -> dict[str, Any]:
    first = local.first_bad()
    if first is None:
        return {"bad": None}
    return {
        "bad": f"{first.bad.name[:_MAX_NAME]} {first.bad.state}",
        "uncertainty": first.uncertainty,
        "order": first.order,
        "arrived": local.bad_output_gradient(),
        "slices": local.bad_slices(),
        "input": local.bad_input(),
    }


def _exchange(axis: Axis, subject: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every rank's findings.

    Through the store on which the ranks met, and not through a group: where one is alone with its finding, the others
    go on, and their next collective would take its message for an answer.
    """
    store = _get_default_store()
    names = [f"samestep/nonfinite/{axis.ranks[0]}/{subject}/{rank}" for rank in axis.ranks]
    store.set(names[axis.rank], json.dumps(mine))
    store.wait(names, timedelta(seconds=TIMEOUT_S))
    return [decode_message(store.get(name), *FINDINGS, of="what a rank found in its gradients") for name in names]
