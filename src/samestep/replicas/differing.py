"""Which ranks differ from most, and in what: pure, from digests that all ranks have told each other.

                  rank 0    rank 1    rank 2
    0.weight       a3…       a3…       a3…
    0.bias         17…       17…       5c…        rank 2 differs from the others
    2.weight       40…       99…       e1…        no version is on most ranks: nobody can tell who is right

More than half of the ranks are taken to be right, tensor by tensor. The version that a repair would send to all is
theirs, otherwise that of the lowest rank among those that agree with most. An optimizer's numbers are told first: one
rank's own learning rate explains all the tensors behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__: list[str] = []

NUMBER = "number"  # the kind of an optimizer's numbers
MOST_NAMES = 3  # of tensors, in a sentence
MOST_PARTIES = 4  # ranks or sets of ranks that differ, likewise
_MOST_LETTERS = 200  # of a name

Told = Mapping[str, Sequence[Any]]  # by name: digest, and what kind of value it is


@dataclass(frozen=True)
class Difference:
    """Something that is not alike on all ranks.

    Attributes:
        name: of the tensor or number.
        source: the position of the rank whose version a repair sends to all.
        others: the positions of those that hold another version than it.
        is_decided: whether most ranks hold the source's version.
        can_be_sent: whether all ranks have it, of one type and shape.
        is_number: whether it is an optimizer's number, and no tensor.
    """

    name: str
    source: int
    others: tuple[int, ...]
    is_decided: bool
    can_be_sent: bool
    is_number: bool = False


def differences(told: Sequence[Told]) -> list[Difference]:
    """Returns what is not alike, numbers first.

    Args:
        told: by position: every rank's digests and kinds, by name.
    """
    return sorted(_differences(told), key=lambda one: not one.is_number)


def _differences(told: Sequence[Told]) -> Iterator[Difference]:
    for name in dict.fromkeys(name for one in told for name in one):
        versions = [tuple(one[name]) if name in one else None for one in told]
        holders: dict[tuple[Any, ...] | None, list[int]] = {}
        for position, version in enumerate(versions):
            holders.setdefault(version, []).append(position)
        if len(holders) > 1:
            right = max(holders.values(), key=len)  # of several as many, that with the lowest rank
            others = tuple(position for position in range(len(told)) if position not in right)
            kinds = {None if version is None else version[1] for version in versions}
            is_decided = 2 * len(right) > len(told)
            can_be_sent = len(kinds) == 1 and None not in kinds
            yield Difference(name, right[0], others, is_decided, can_be_sent, is_number=NUMBER in kinds)


def culprits(found: Sequence[Difference]) -> tuple[int, ...]:
    """Returns the positions of the ranks that differ from most; empty where nobody can tell."""
    return tuple(sorted({position for one in found if one.is_decided for position in one.others}))


def who(found: Sequence[Difference], ranks: Sequence[int]) -> str:
    """Returns a sentence on who differs in what.

    Args:
        found: at least one difference.
        ranks: all ranks, by position.
    """
    parties: dict[tuple[int, ...] | None, list[str]] = {}
    for one in found:
        parties.setdefault(one.others if one.is_decided else None, []).append(one.name)
    said = [_party(others, names, ranks) for others, names in parties.items()]
    rest = (
        [f"{len(said) - MOST_PARTIES} more sets of ranks differ in other tensors"] if len(said) > MOST_PARTIES else []
    )
    return "; ".join(said[:MOST_PARTIES] + rest)


def _party(others: tuple[int, ...] | None, names: Sequence[str], ranks: Sequence[int]) -> str:
    what = first_of(names)
    if others is not None:
        verb = "differs" if len(others) == 1 else "differ"
        return f"{ranks_named([ranks[position] for position in others])} {verb} from the others in {what}"
    if len(ranks) == 2:
        return f"{ranks_named(ranks)} differ in {what}, and of two nobody can tell which is right"
    return f"{ranks_named(ranks)} differ in {what}, no version is on most, and nobody can tell which is right"


def first_of(names: Sequence[str]) -> str:
    """Returns the first few names, and how many more there are."""
    shown = [name[:_MOST_LETTERS] for name in names[:MOST_NAMES]]
    if len(names) > MOST_NAMES:
        return f"{', '.join(shown)} and {len(names) - MOST_NAMES} more"
    return _listed(shown)


def ranks_named(ranks: Sequence[int]) -> str:
    """Returns `rank 2`, or `ranks 0, 1 and 2`.

    Example:
        >>> ranks_named([2]), ranks_named([0, 1, 2])
        ('rank 2', 'ranks 0, 1 and 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed([str(rank) for rank in ranks])}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
