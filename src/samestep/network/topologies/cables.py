"""The kinds of link in a network: what each costs, given once for all links of the kind.

    rank ══inside══ rank                            two ranks of one host; the network is not asked
    rank                                            rank
      └ host ──port── switch ──between── switch ──port── host
                         └──far── switch of another group (dragonfly)

A message pays the latency of every link that it passes, and `overhead_s` once, for its two ends together: what is
measured from rank to rank is overhead and links in one. A data sheet has the links alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from samestep.errors import UsageError
from samestep.network.links import Link

__all__: list[str] = []


@dataclass(frozen=True)
class Cables:
    """What the links of a network cost; each link carries its bandwidth both ways at once.

    Attributes:
        between: from a switch to a switch, or from a host to a host where there are no switches.
        port: from a host to its switch; where None, the same as `between`.
        far: from a group of a dragonfly to another; where None, the same as `between`.
        inside: from a rank to another on its host; where None, the same as `port`.
        local: ranks on each host.
        overhead_s: seconds that a message takes beside its links, at both ends together.

    Raises:
        UsageError: fewer than 1 rank on a host, or an overhead or latency that is negative or endless.

    Example:
        >>> cables = Cables(between=Link(0.5e-6, 25e9), inside=Link(2e-6, 300e9), local=8)
        >>> cables.port_link == cables.between
        True
    """

    between: Link
    port: Link | None = None
    far: Link | None = None
    inside: Link | None = None
    local: int = 1
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.local < 1:
            raise UsageError(f"local is {self.local} ranks on each host: give 1 or more")
        if not 0 <= self.overhead_s < math.inf:
            raise UsageError(f"a message takes {self.overhead_s} s beside its links: give seconds, 0 or more")
        for name in ("between", "port", "far", "inside"):
            link = getattr(self, name)
            if link is not None and not math.isfinite(link.latency_s):
                raise UsageError(f"the latency of link {name!r} is {link.latency_s} s: give seconds, 0 or more")

    @property
    def port_link(self) -> Link:
        """From a host to its switch."""
        return self.port or self.between

    @property
    def far_link(self) -> Link:
        """From a group to another."""
        return self.far or self.between

    @property
    def inside_link(self) -> Link:
        """From a rank to another on its host."""
        return self.inside or self.port_link
