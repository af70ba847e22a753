"""Fat tree: levels of switches, as much bandwidth upward as downward, or less where links are to be saved.

    level 2      0    1                   down (2, 3), up (2,): 2 hosts on each of 3 leaves, which have 2 links up
               ┌─┼─┬──┼─┐                 to 2 spines. As many up as down: no contention that the right spine could
    level 1    0   1    2                 not avoid. up (1,): oversubscribed 2 to 1
              ┌┴┐ ┌┴┐  ┌┴┐
    hosts     0 1 2 3  4 5

Level by level, a switch has `down[level]` links to what is below it and `up[level]` to what is above. Written (a, b),
a counts the subtrees and b the switches that stand for one of them; host s is below the switches (s // M, any b), M
being the hosts of such a subtree, W the number of its top switches:

[1] D-mod-k: the way to host t climbs by (s // M, t mod W), to the first subtree that holds both, and descends by
    (t // M, t mod W). So the ways to one host never part again, and those to hosts next to each other never meet:
    shifts and exchanges find every link free, where as many lead up as down.
[2] Split evenly over all W common switches of the lowest subtree that holds both, as ECMP hashes flows.
[3] By a random one of them, which is Valiant's routing here.

Sources: F. Petrini and M. Vanneschi, "k-ary n-trees", IPPS 1997; S. Ohring et al., "On generalized fat trees", IPPS
1995; E. Zahavi, "Fat-tree routing and node ordering providing contention free traffic for MPI global collectives",
JPDC 72, 2012.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.messages import Floats, Ints
from samestep.network.topologies.topology import Hop, LinkTypes, Segments, Size, Topology
from samestep.parsing import whole


@dataclass(frozen=True)
class FatTree(Topology):
    """Levels of switches above the hosts.

    Attributes:
        down: links of a switch to what is below it, level 1 first, whose are hosts.
        up: links of a switch to what is above it, level 1 first; the top level has none.

    Raises:
        UsageError: a number below 1, or not one number of links up fewer than down.

    Example:
        >>> tree = FatTree(LinkTypes(Link(1e-6, 25e9)), down=(16, 16), up=(8,))
        >>> print(tree, tree.oversubscription)
        fat tree 16x16, up 8: 256 hosts, 24 switches, 768 directed links 2.0
    """

    down: tuple[int, ...]
    up: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.down or len(self.up) != len(self.down) - 1:
            raise UsageError(
                f"a fat tree of {len(self.down)} levels has {len(self.up)} numbers of links up: "
                "give one fewer than levels, such as down=(16, 16), up=(16,)"
            )
        for name, numbers in (("down", self.down), ("up", self.up)):
            for level, number in enumerate(numbers, start=1):
                whole(1)(number, f"the number of links {name} of a fat tree's level {level}")

    @cached_property
    def size(self) -> Size:
        """The routers are the switches of all levels, the leaves first; the diameter leads to the top and down."""
        up = f", up {'x'.join(map(str, self.up))}" if self.up else ""
        routers = sum(self._switches(level) for level in self._levels())
        name = f"fat tree {'x'.join(map(str, self.down))}{up}"
        return Size(name, math.prod(self.down), routers, self.down[0], 2 * len(self.up))

    @property
    def oversubscription(self) -> float:
        """Hosts of a subtree for each cable that leads out of it, at the narrowest level; 1 is non-blocking."""
        return max([1.0, *(self._below(level) / self._tops(level + 1) for level in self._levels()[:-1])])

    @property
    def bisection(self) -> int | None:
        """LinkTypes that part the hosts in halves; None where the top level cannot be halved."""
        if self.down[-1] % 2:
            return None
        largest = self._below(len(self.down) - 1)
        across = min(
            [largest, *(largest // self._below(level) * self._tops(level + 1) for level in self._levels()[:-1])]
        )
        return self.down[-1] // 2 * across

    def link_counts(self) -> tuple[tuple[int, Link], ...]:
        """Returns that all are alike: the links up, by the switch and port that they leave, then the same down."""
        return ((2 * self._cables_below(len(self.down)), self.link_types.router),)

    def link_ends(self, number: int) -> tuple[int, int]:
        falls, number = divmod(number, self._cables_below(len(self.down)))
        level = next(each for each in self._levels() if number < self._cables_below(each + 1))
        low, port = divmod(number - self._cables_below(level), self.up[level - 1])
        ends = self._switches_below(level) + low, self._parent(level, low, port)
        return ends[::-1] if falls else ends

    def adjacent(self, router: int) -> list[int]:
        """Returns the switches below, then those above."""
        level = next(each for each in self._levels() if router < self._switches_below(each + 1))
        number = router - self._switches_below(level)
        ports = range(self.up[level - 1]) if level <= len(self.up) else ()
        return [*self._children(level, number), *(self._parent(level, number, port) for port in ports)]

    def hops(self, segments: Segments, *, split: bool) -> Iterator[Hop]:
        """Yields the hops of [1], or of [2]; from leaf to leaf."""
        climbing = [self._climbing(segments, level) for level in self._levels()[:-1]]
        rising = [(level, segments.begins, 0) for level in self._levels()[:-1]]
        falling = [
            (level, segments.ends, self._cables_below(len(self.down))) for level in reversed(self._levels()[:-1])
        ]
        for level, leaves, first in rising + falling:
            going = climbing[level - 1]
            cables = leaves[going] // self._leaves(level) * self._tops(level + 1) + first + self._cables_below(level)
            if split:  # [2]: all cables out of the subtree; they are numbered without a gap
                tops = self._tops(level + 1)
                links: Any = cables[:, None] + np.arange(tops)
                yield Hop(np.repeat(going, tops), links.reshape(-1), np.full(links.size, 1 / tops))
            else:  # [1]: the cable of switch (subtree, t mod W), by port t // W
                ports, tops, path_hash = self.up[level - 1], self._tops(level), segments.path_hash[going]
                chosen = cables + path_hash % tops * ports + path_hash // tops % ports
                yield Hop(going, chosen, np.ones(len(going)))

    def link_loads(self, segments: Segments, nbytes: Floats, *, split: bool) -> tuple[Floats, Floats]:
        """Returns the bytes on each link and the latency of each segment; of [2], subtree by subtree."""
        if not split:
            return super().link_loads(segments, nbytes, split=False)
        load, latency = [np.zeros(0)], np.zeros(len(nbytes))
        for leaves in (segments.begins, segments.ends):
            for level in self._levels()[:-1]:
                going = self._climbing(segments, level)
                subtrees = self._leaves(len(self.down)) // self._leaves(level)
                loads = np.bincount(leaves[going] // self._leaves(level), nbytes[going], subtrees)
                load.append(np.repeat(loads / self._tops(level + 1), self._tops(level + 1)))
                latency[going] += self.link_types.router.latency_s
        return np.concatenate(load), latency

    def via_random(self, segments: Segments, draws: Ints) -> list[Segments]:
        """Returns [3]."""
        return [Segments(segments.begins, segments.ends, draws)]

    def _levels(self) -> range:
        return range(1, len(self.down) + 1)

    def _below(self, level: int) -> int:
        """M: hosts below a switch of the level."""
        return math.prod(self.down[:level])

    def _leaves(self, level: int) -> int:
        """Leaves below a switch of the level."""
        return math.prod(self.down[1:level])

    def _tops(self, level: int) -> int:
        """W: switches of the level above the same hosts."""
        return math.prod(self.up[: level - 1])

    def _switches(self, level: int) -> int:
        return math.prod(self.down[level:]) * self._tops(level)

    def _switches_below(self, level: int) -> int:
        """How many stand on lower levels: the number of the first of this one."""
        return sum(self._switches(each) for each in range(1, level))

    def _cables_below(self, level: int) -> int:
        """How many lead up to this level or a lower one: the number of the first that leads up from it."""
        return sum(self._switches(each) * self.up[each - 1] for each in range(1, level))

    def _parent(self, level: int, number: int, port: int) -> int:
        subtree, top = divmod(number, self._tops(level))
        above = subtree // self.down[level] * self._tops(level + 1) + top + port * self._tops(level)
        return self._switches_below(level + 1) + above

    def _children(self, level: int, number: int) -> Iterator[int]:
        if level == 1:
            return
        subtree, top = divmod(number, self._tops(level))
        for child in range(self.down[level - 1]):
            low = (subtree * self.down[level - 1] + child) * self._tops(level - 1) + top % self._tops(level - 1)
            yield self._switches_below(level - 1) + low

    def _climbing(self, segments: Segments, level: int) -> Ints:
        """The messages that must leave their subtree of the level."""
        leaves = self._leaves(level)
        return np.nonzero(segments.begins // leaves != segments.ends // leaves)[0]


def leaf_spine(link_types: LinkTypes, leaves: int, hosts: int, spines: int) -> FatTree:
    """Returns two levels: `leaves` with as many `hosts` each, and a link to each of the spines.

    >>> leaf_spine(LinkTypes(Link(1e-6, 25e9)), leaves=16, hosts=16, spines=8).name
    'fat tree 16x16, up 8'
    """
    return FatTree(link_types, (hosts, leaves), (spines,))


def of_ports(link_types: LinkTypes, ports: int, oversubscription: int = 1) -> FatTree:
    """Returns three levels of switches that have so many ports: k^3/4 hosts where nothing is oversubscribed.

    Args:
        link_types: what the links cost.
        ports: k, even.
        oversubscription: hosts on a leaf for each link up; ports must divide by one more.

    Raises:
        UsageError: the ports cannot be divided so.

    Example:
        >>> [of_ports(LinkTypes(Link(1e-6, 25e9)), k).hosts for k in (4, 48, 74)]
        [16, 27648, 101306]
    """
    whole(1)(oversubscription, "the oversubscription of a fat tree")
    whole(2)(ports, "the number of ports of a fat tree's switches")
    if ports % 2 or ports % (oversubscription + 1):
        fitting = math.lcm(2, oversubscription + 1)
        raise UsageError(
            f"switches of {ports} ports cannot make a fat tree oversubscribed {oversubscription} to 1: "
            f"give a multiple of {fitting}, such as {max(1, round(ports / fitting)) * fitting}"
        )
    up = ports // (oversubscription + 1)
    return FatTree(link_types, (ports - up, ports // 2, ports), (up, ports // 2))
