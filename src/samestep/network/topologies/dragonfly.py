"""Dragonfly: groups of switches, all of a group joined to each other, and every group to every other by one cable.

    group 0            group 1            group 2         p = 1 host on each of
    ┌ switch 0 ─ host  ┌ switch 0 ─ host  ┌ switch 0      a = 2 switches a group, each with
    │   │ └────────────┼─▶ switch 1       │   │           h = 1 cable to other groups: at most
    └ switch 1         └ ...              └ switch 1      g = a h + 1 = 3 groups
         └──────────────────────────────────▶

[1] The cables of a group are numbered 0 to g - 2, h on each switch; cable j of group x leads to group x + j + 1, where
    it is cable g - 2 - j (Camarero et al.'s palm tree). Balanced is a = 2p = 2h.
[2] Minimal routing: within the group to the switch that has the cable, over it, and to the switch of the host: 3 hops
    at most, the only way of one cable between groups, so there is nothing to split. By two such cables a few switches
    are nearer to each other than so; dragonflies do not route that way.
[3] A circuit through all switches enters each group at one end and leaves it at the other.

Sources: J. Kim et al., "Technology-driven, highly-scalable dragonfly topology", ISCA 2008; C. Camarero, E. Vallejo and
R. Beivide, "Topological characterization of Hamming and dragonfly networks", TACO 11, 2014.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.messages import Ints
from samestep.network.topologies.topology import Hop, LinkTypes, Segments, Size, Topology
from samestep.parsing import whole


@dataclass(frozen=True)
class Dragonfly(Topology):
    """Groups of switches.

    Attributes:
        p: hosts on each switch.
        a: switches in each group.
        h: cables of each switch to other groups.
        g: groups; a h + 1 where 0. With fewer, some cables' ports stay empty.

    Raises:
        UsageError: a number below 1, or more groups than cables reach.

    Example:
        >>> print(Dragonfly(LinkTypes(Link(1e-6, 25e9)), p=4, a=8, h=4))
        dragonfly p=4 a=8 h=4 g=33: 1056 hosts, 264 switches, 5016 directed links
    """

    p: int
    a: int
    h: int
    g: int = 0

    def __post_init__(self) -> None:
        whole(1)(self.p, "p, the hosts on a dragonfly's switch,")
        whole(1)(self.a, "a, the switches in a dragonfly's group,")
        whole(1)(self.h, "h, the cables of a dragonfly's switch to other groups,")
        whole(0)(self.g, "g, the groups of a dragonfly,")
        if self.g > self.a * self.h + 1:
            raise UsageError(
                f"{self.a} switches with {self.h} cables each reach {self.a * self.h} other groups, not {self.g - 1}: "
                f"give at most {self.a * self.h + 1} groups"
            )

    @property
    def groups(self) -> int:
        return self.g or self.a * self.h + 1

    @cached_property
    def size(self) -> Size:
        """The diameter is a hop in each group, and one between them."""
        name = f"dragonfly p={self.p} a={self.a} h={self.h} g={self.groups}"
        routers, several = self.a * self.groups, self.groups > 1
        return Size(name, self.p * routers, routers, self.p, several + (1 + several) * (self.a > 1))

    def link_counts(self) -> tuple[tuple[int, Link], ...]:
        """Returns the links within groups, by the switch that they leave, then those between groups, by the group."""
        near = self.routers * (self.a - 1), self.link_types.router
        return near, (self.groups * (self.groups - 1), self.link_types.far)

    def link_ends(self, number: int) -> tuple[int, int]:
        near = self.link_counts()[0][0]
        if number < near:
            router, other = divmod(number, self.a - 1)
            group, here = divmod(router, self.a)
            return router, group * self.a + other + (other >= here)
        group, cable = divmod(number - near, self.groups - 1)
        return group * self.a + cable // self.h, self._far_end(group, cable)

    def adjacent(self, router: int) -> list[int]:
        """Returns the others of the group, then those that its own cables lead to."""
        group, here = divmod(router, self.a)
        others = [group * self.a + other for other in range(self.a) if other != here]
        cables = range(here * self.h, min((here + 1) * self.h, self.groups - 1))
        return others + [self._far_end(group, cable) for cable in cables]

    def hops(self, segments: Segments, *, split: bool) -> Iterator[Hop]:  # noqa: ARG002 - there is but one way [2]
        """Yields the hops of [2]."""
        begins, ends = segments.begins // self.a, segments.ends // self.a
        cable = (ends - begins - 1) % self.groups
        leaving, entering = begins * self.a + cable // self.h, ends * self.a + (self.groups - 2 - cable) // self.h
        outward = begins != ends
        yield self._near(segments.begins, leaving, outward)
        yield _taken(outward, self.link_counts()[0][0] + begins * (self.groups - 1) + cable)
        yield self._near(entering, segments.ends, outward)
        yield self._near(segments.begins, segments.ends, ~outward)

    def circuit(self) -> list[int] | None:
        """Returns [3], by the first stride from group to group whose cables end on different switches."""
        if self.groups == 1:
            return list(range(self.a))
        for stride in range(1, self.groups):
            leaves, enters = (stride - 1) // self.h, (self.groups - 1 - stride) // self.h
            if math.gcd(stride, self.groups) == 1 and (leaves != enters or self.a == 1):
                inner = [each for each in range(self.a) if each not in {leaves, enters}]
                order = [enters, *inner, leaves][-self.a :]
                groups = (number * stride % self.groups for number in range(self.groups))
                return [group * self.a + here for group in groups for here in order]
        return None

    def _far_end(self, group: int, cable: int) -> int:
        """[1]: the switch that a group's cable leads to."""
        other = (group + cable + 1) % self.groups
        return other * self.a + (self.groups - 2 - cable) // self.h

    def _near(self, begins: Ints, ends: Ints, among: Ints) -> Hop:
        """The hop within a group, of those who are not there yet."""
        here, there = begins % self.a, ends % self.a
        return _taken(among & (here != there), begins * (self.a - 1) + there - (there > here))


def _taken(taking: Ints, links: Ints) -> Hop:
    (messages,) = np.nonzero(taking)
    return Hop(messages, links[messages], np.ones(len(messages)))


def balanced(link_types: LinkTypes, h: int) -> Dragonfly:
    """Returns the dragonfly of a = 2p = 2h and all groups: 4h^4 + 2h^2 hosts.

    >>> [balanced(LinkTypes(Link(1e-6, 25e9)), h).hosts for h in (2, 4, 13)]
    [72, 1056, 114582]
    """
    return Dragonfly(link_types, p=h, a=2 * h, h=h)
