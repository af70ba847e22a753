"""One switch that all hosts stand at: nothing is ever in anybody's way but the hosts' own ports.

        host 0   host 1   host 2   host 3
           └────────┴─switch─┴────────┘

The oracle of every other network: none is quicker, and a price here is that of :mod:`samestep.network.formulas`, with
two ports' latency as alpha.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from samestep.network.links import Link
from samestep.network.topologies.topology import Hop, Legs, Topology, Turn, whole

__all__: list[str] = []


@dataclass(frozen=True)
class Switch(Topology):
    """One switch.

    Attributes:
        ports: one for each host.

    Example:
        >>> from samestep.network.topologies.cables import Cables
        >>> print(Switch(Cables(Link(1e-6, 12.5e9)), ports=16))
        switch of 16 ports: 16 hosts, 1 switch, 32 directed links
    """

    ports: int

    def __post_init__(self) -> None:
        whole(self.ports, "the number of a switch's ports", 1)

    @property
    def name(self) -> str:
        """What it is."""
        return f"switch of {self.ports} ports"

    @property
    def hosts(self) -> int:
        """One a port."""
        return self.ports

    @property
    def routers(self) -> int:
        """The switch."""
        return 1

    @property
    def concentration(self) -> int:
        """All hosts."""
        return self.ports

    @property
    def diameter(self) -> int:
        """There is nowhere to go."""
        return 0

    def fabric(self) -> tuple[tuple[int, Link], ...]:
        """Returns that there is none."""
        return ()

    def wire(self, number: int) -> tuple[int, int]:
        """Refuses: there is no link between switches."""
        raise IndexError(number)

    def adjacent(self, _router: int) -> list[int]:
        """Returns no switch."""
        return []

    def between(self, _legs: Legs, *, every: bool) -> Iterator[Hop]:  # noqa: ARG002 - all ways are of no hops
        """Yields nothing."""
        return iter(())

    def turn(self, distance: int) -> Turn | None:
        """Returns that every port carries one byte each way."""
        port = self.cables.port_link
        moves = distance % self.hosts != 0
        return Turn(2 * port.latency_s * moves, ((float(moves), port),))

    def circuit(self) -> list[int]:
        """Returns the switch."""
        return [0]
