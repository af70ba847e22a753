"""Parameter server: some ranks add for all; two rounds, in which many messages meet at each server.

4 ranks, 2 servers, blocks a b. Servers are ranks too, spread evenly over all of them:

              [1] push: added on arrival           [2] pull: put in its place
    rank 0    server of a  ◀─ a of 1, 2, 3         a ─▶ 1, 2, 3
    rank 1    a ─▶ 0, b ─▶ 2                       ◀─ a, b
    rank 2    server of b  ◀─ b of 0, 1, 3         b ─▶ 0, 1, 3
    rank 3    a ─▶ 0, b ─▶ 2                       ◀─ a, b

Cost: 2 (p-1) (alpha + n/S beta) + (p-1) n/S gamma with S servers, one message after another through a server's
port. With one server that is 2 (p-1) n beta, the dearest of all; with p of them the bytes of the ring.

Bits: one server finishes each block and the others are sent copies. A server adds what came in to its own in the order
of the ranks, so a single server, on rank 0, gives ((0 + 1) + 2) + 3, the plain sum over ranks; several begin with
their own and differ.

Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

import numpy as np

from samestep.collectives.plan import Plan, check_ranks
from samestep.errors import UsageError
from samestep.network.messages import AllToAll, Messages, reverse, send, with_root


def all_reduce(ranks: int, servers: int = 1) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    Raises:
        UsageError: not 1 to `ranks` servers.

    Example:
        >>> plan = all_reduce(4, servers=2)
        >>> len(plan.rounds), [one.source for one in plan.rounds[1]]
        (2, [0, 0, 0, 2, 2, 2])
    """
    check_ranks(ranks)
    if not 1 <= servers <= ranks:
        raise UsageError(f"{servers} servers among {ranks} ranks: give 1 to {ranks}")
    name = "1 server" if servers == 1 else f"{servers} servers"
    return Plan(name, "all_reduce", ranks, servers, lambda: [*reverse(_pull(ranks, servers)), *_pull(ranks, servers)])


def reduce_scatter(ranks: int) -> Plan:
    """Returns the plan by which rank r ends with block r of the sum: every rank is a server, and nobody pulls."""
    return Plan("direct", "reduce_scatter", ranks, ranks, lambda: reverse(_pull(ranks, ranks)))


def all_gather(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with block r of rank r, for every r, each sent by who has it."""
    return Plan("direct", "all_gather", ranks, ranks, lambda: _pull(ranks, ranks))


def broadcast(ranks: int, root: int = 0) -> Plan:
    """Returns the plan by which `root` sends what it has to every other rank."""
    return Plan("direct", "broadcast", ranks, 1, lambda: with_root(_pull(ranks, 1), ranks, root), root)


def reduce(ranks: int, root: int = 0) -> Plan:
    """Returns the plan by which every other rank sends all it has to `root`, which ends with the sum."""
    return Plan("direct", "reduce", ranks, 1, lambda: with_root(reverse(_pull(ranks, 1)), ranks, root), root)


def _pull(ranks: int, servers: int) -> list[Messages]:
    """[2]: block s from server s, which is rank s x ranks / servers, to everybody else; [1] is the same backwards."""
    if ranks == 1:
        return []
    if servers == ranks:
        return [AllToAll(np.arange(ranks)[None], np.zeros(1, dtype=np.int64), 1, adds=False)]
    home, rank = (each.ravel() for each in np.indices((servers, ranks)))
    server = home * ranks // servers
    others = server != rank
    return [send(server[others], rank[others], home[others])]
