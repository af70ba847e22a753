"""What a cluster offers to a way of using it: all-reduces among replicas, and messages between stages.

4 hosts of 4 devices, replicas of 2 stages     ranks of a replica are neighbours, so the replicas' sums go
  host 0   0a 0b 1a 1b                         from every second device to every second device: two sums at once
  host 1   2a 2b 3a 3b                         through each host's NIC, which has half its bandwidth for either
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from samestep.network import formulas
from samestep.network.links import Link, Links

__all__: list[str] = []


@dataclass(frozen=True)
class Sum:
    """An all-reduce that could be taken.

    Attributes:
        name: of the algorithm.
        link: seconds of n bytes, as latency and bytes a second.
    """

    name: str
    link: Link


class Fabric(Protocol):
    """What carries messages between ranks."""

    @property
    def ranks(self) -> int:
        """How many there can be."""

    def sums(self, replicas: int, stages: int, nbytes: float) -> Sequence[Sum]:
        """Returns the all-reduces of about `nbytes` among replicas, while all stages' sums are under way."""

    def hop(self, replicas: int, stages: int) -> Link:
        """Returns what is between one stage and the next."""


@dataclass(frozen=True)
class Flat:
    """All ranks at one switch, with the closed forms: the plain fabric that others are compared with.

    Attributes:
        link: from any rank to any other.
        ranks: how many there can be.
        adding_bytes_per_s: 1 / gamma.

    Example:
        >>> [one.name for one in Flat(Link(1e-6, 1e9), 8).sums(4, 1, 1e6)]
        ['ring', 'halving and doubling', 'recursive doubling']
    """

    link: Link
    ranks: int
    adding_bytes_per_s: float = float("inf")

    def sums(self, replicas: int, stages: int, nbytes: float) -> Sequence[Sum]:  # noqa: ARG002
        """Returns three, of a latency and a bandwidth each."""
        links = Links(self.link, adding_bytes_per_s=self.adding_bytes_per_s)
        forms = {
            "ring": formulas.ring,
            "halving and doubling": formulas.halving_doubling,
            "recursive doubling": formulas.recursive_doubling,
        }
        return [Sum(name, line(partial(form, replicas, links=links), nbytes)) for name, form in forms.items()]

    def hop(self, replicas: int, stages: int) -> Link:  # noqa: ARG002
        """Returns the one link."""
        return self.link


def line(seconds: Callable[[float], float], nbytes: float) -> Link:
    """Returns the link that takes as long as an all-reduce of `nbytes`, and as one of an eighth.

    Most cost a latency and so much a byte. One that is cut into more chunks the longer it is lies a little below its
    line in between.

    >>> line(lambda nbytes: 0.5 + nbytes / 100, nbytes=80)
    Link(latency_s=0.5, bytes_per_s=100.0)
    """
    few, many = seconds(nbytes / 8), seconds(nbytes)
    each = (many - few) / (nbytes * 7 / 8) if nbytes else 0.0
    latency = max(0.0, many - nbytes * each)
    return Link(float(f"{latency:.9g}"), float(f"{1 / each:.9g}") if each > 0 else float("inf"))
