"""What some ranks owe, told to another number of ranks: nothing is lost, and the next mean is what it would have been.

brought, owed, late    each rank's own: their mean goes to every new rank, for a mean is taken of what they bring
added                  a share's, of the mean already: put together from the shares, and brought by every new rank
basis                  alike on all ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from samestep.compress.memory import State

__all__: list[str] = []


def redistribute(states: Sequence[State], numbers: Mapping[str, int], block: int) -> State:
    """Returns what every rank of another world is to remember.

    Args:
        states: of the ranks that were, in order.
        numbers: of the pieces, by name.
        block: elements of a row.
    """
    made: State = {}
    for kind in states[0]:
        pieces = states[0][kind]
        if kind == "basis":
            made[kind] = {name: part.clone() for name, part in pieces.items()}
        elif kind != "added":
            made[kind] = {name: _mean([state[kind][name] for state in states]) for name in pieces}
    for name in states[0].get("added", {}):
        whole = _together([state["added"][name] for state in states], numbers[name], block)
        brought = made.setdefault("brought", {}).setdefault(name, torch.zeros_like(whole))
        brought += whole
    return made


def _mean(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).mean(0)


def _together(shares: Sequence[Tensor], number: int, block: int) -> Tensor:
    """Puts a piece's rows together; see :mod:`samestep.compress.chunks` for whose they are."""
    size = len(shares)
    whole = torch.zeros(sum(share.numel() for share in shares) // block, block)
    for rank, share in enumerate(shares):
        whole[(rank - number) % size :: size] = share.view(-1, block)
    return whole.view(-1)
