"""Hierarchical: inside the hosts first, then between them, then inside again, so that little crosses the slow links.

2 hosts of 3 ranks. The buffer is cut into 3 chunks, one for each rank of a host, and those into 2 blocks:

                       [1] reduce-scatter       [2] all-reduce of that chunk       [3] all-gather
                           inside the host          with its peers elsewhere           inside the host
    host 0  rank 0         chunk 0 of 0+1+2     ┐   chunk 0 of all    ┐                all chunks
            rank 1         chunk 1 of 0+1+2     │┐  chunk 1 of all    │┐               all chunks
            rank 2         chunk 2 of 0+1+2     ││┐ chunk 2 of all    ││┐              all chunks
    host 1  rank 3         chunk 0 of 3+4+5     ┘││ chunk 0 of all    ┘││              all chunks
            rank 4         chunk 1 of 3+4+5      ┘│ chunk 1 of all     ┘│              all chunks
            rank 5         chunk 2 of 3+4+5       ┘ chunk 2 of all      ┘              all chunks

Cost, with g ranks on each of N hosts, links 1 inside and 2 between, and rings for all three: 2 (g-1) alpha1 +
2 (g-1)/g n beta1 + 2 (N-1) alpha2 + 2 (N-1)/N n/r beta2 + (p-1)/p n gamma, for r NICs a host. A ring over all ranks
sends as little through each NIC, so what one NIC gains here is latency; several NICs are used side by side.

Bits: the levels keep what their parts have. One rank finishes each block and the others are sent copies.

Source: X. Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", arXiv:1807.11205, 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from samestep.collectives import ring, tree
from samestep.collectives.plan import Plan, check_ranks
from samestep.errors import UsageError
from samestep.network.messages import Ints, Messages, remap


def all_reduce(ranks: int, local: int, across: Callable[[int], Plan] = ring.all_reduce) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    Args:
        ranks: in all; rank r stands on host r / local.
        local: on each host.
        across: the plan of an all-reduce among so many hosts, for [2].

    Raises:
        UsageError: the ranks are not the same number on each host.

    Example:
        >>> plan = all_reduce(6, local=3)
        >>> plan.name, plan.blocks, len(plan.rounds)
        ('hierarchical 2x3 (ring)', 6, 6)
    """
    hosts = _hosts(ranks, local)
    between = across(len(hosts))
    name = f"hierarchical {len(hosts)}x{local} ({between.name})"
    return Plan(name, "all_reduce", ranks, local * between.blocks, lambda: two_levels(hosts, between))


def broadcast(ranks: int, local: int, root: int = 0) -> Plan:
    """Returns the plan by which all ranks end with what `root` has: a tree over the hosts, then one inside each.

    Raises:
        UsageError: the ranks are not the same number on each host.

    Example:
        >>> len(broadcast(6, local=3, root=4).rounds)
        3
    """
    hosts = _hosts(ranks, local)
    host, place = divmod(root, local)

    def rounds() -> Iterator[Messages]:
        yield from remap(tree.spread(len(hosts), host), hosts[:, place])
        yield from remap(tree.spread(local, place), hosts)

    return Plan(f"hierarchical {len(hosts)}x{local}", "broadcast", ranks, 1, rounds, root)


def two_levels(lines: Ints, between: Plan, first: int = 0) -> Iterator[Messages]:
    """Yields [1], [2] and [3], over the blocks from `first` on.

    Args:
        lines: the ranks of each host, or of each row of a grid.
        between: an all-reduce over as many ranks as there are lines.
        first: the block that chunk 0 begins at.
    """
    width = lines.shape[1]
    yield from remap(ring.scatter(width), lines, first, between.blocks)  # [1]
    yield from remap(between.make_rounds(), lines.T, first + np.arange(width) * between.blocks)  # [2]
    yield from remap(ring.gather(width), lines, first, between.blocks)  # [3]


def _hosts(ranks: int, local: int) -> Ints:
    """The ranks of each host, a row for each."""
    check_ranks(ranks)
    if local < 1 or ranks % local:
        raise UsageError(
            f"{ranks} ranks cannot be {local} on each host: give a number that divides {ranks}, "
            "or take an algorithm that knows no hosts"
        )
    return np.arange(ranks).reshape(-1, local)
