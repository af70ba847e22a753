"""What each algorithm costs in closed form: one line each, for 4 ranks or 100,000.

p ranks, n bytes on each; a = alpha, nb = n beta, ng = n gamma; h = ceil(log2 p), q the power of two at or below p.
A rank sends and receives one message at a time (full duplex, one port), and the ranks go from round to round together.

    all-reduce                seconds
    ring                      2 (p-1) a + (p-1)/p (2 nb + ng)
    segmented ring, k >= 2    2 (p-1) k a + (p-1)/p 2 nb, and what adding a segment takes longer than sending one
    recursive doubling        log2 q (a + nb + ng)                      + 2 a + 2 nb + ng where p is not q
    halving and doubling      2 log2 q a + (q-1)/q (2 nb + ng)          + 2 a + 2 nb + ng where p is not q
    binomial tree             2 h (a + nb) + h ng, or one ng less where p is 3/4 of 2^h or less
    double tree, m chunks     2 (2m + 2h - 2) (a + nb/2m) + (2m + 2h - 2) ng/2m, or less
    S servers                 2 (p-1) (a + nb/S) + (p-1) ng/S           b / crowded where S > 2
    hierarchical, g on N      2 (g-1) (a1 + nb1/g) + 2 (N-1) (a2 + nb2/(N r)) + (p-1)/p ng, r NICs a host
    torus r x c               2 (r+c-2) a + (p-1)/p (2 nb + ng)
    broadcast
    binomial tree             h (a + nb)
    double tree, m chunks     (2m + 2h - 2) (a + nb/2m), or less
    chain of m                (p-2+m) (a + nb/m)

All are what :func:`samestep.network.pricing.price` gives for the plans; the tests compare them. A flat algorithm over
two levels of links is taken to cross with every message; price its plan to know better.

Sources: R. Thakur, R. Rabenseifner and W. Gropp, IJHPCA 19, 2005; E. Chan et al., "Collective communication: theory,
practice, and experience", CCPE 19, 2007. Theirs let all messages of a parameter server share one latency; here a port
takes one message after another.
"""

from __future__ import annotations

from samestep.errors import UsageError
from samestep.network.links import Links


def ring(ranks: int, nbytes: float, links: Links) -> float:
    """Returns the seconds of :func:`samestep.collectives.ring.all_reduce`.

    >>> from samestep.network.links import Link
    >>> ring(100_000, 100e6, Links(Link(5e-6, 12.5e9)))
    1.01598984
    """
    a, nb, ng = _terms(nbytes, links)
    return 2 * (ranks - 1) * a + (2 * nb + ng) * (ranks - 1) / ranks


def segmented_ring(ranks: int, nbytes: float, links: Links, segments: int) -> float:
    """Returns the seconds of :func:`samestep.collectives.segmented.all_reduce`."""
    if segments == 1 or ranks == 1:
        return ring(ranks, nbytes, links)
    a, nb, ng = _terms(nbytes, links)
    rounds, cut = (ranks - 1) * segments, ranks * segments
    return 2 * rounds * (a + nb / cut) + rounds * max(0, ng / cut - (a + nb / cut))


def recursive_doubling(ranks: int, nbytes: float, links: Links) -> float:
    """Returns the seconds of :func:`samestep.collectives.doubling.all_reduce`."""
    a, nb, ng = _terms(nbytes, links)
    return _log2(ranks) * (a + nb + ng) + _fold(ranks, nbytes, links)


def halving_doubling(ranks: int, nbytes: float, links: Links) -> float:
    """Returns the seconds of :func:`samestep.collectives.halving.all_reduce`."""
    a, nb, ng = _terms(nbytes, links)
    power = 1 << _log2(ranks)
    return 2 * _log2(ranks) * a + (2 * nb + ng) * (power - 1) / power + _fold(ranks, nbytes, links)


def binomial_tree(ranks: int, nbytes: float, links: Links) -> float:
    """Returns the seconds of :func:`samestep.collectives.tree.all_reduce`.

    In the last round before the root has everything, somebody must add before sending, unless the ranks are so few
    for the tree's height that only the root has something to add, and does so while it receives.
    """
    a, nb, ng = _terms(nbytes, links)
    height = _height(ranks)
    hidden = 2 < ranks <= 3 << (height - 2)
    return height * (2 * (a + nb) + ng) - (min(ng, a + nb) if hidden else 0)


def double_tree(ranks: int, nbytes: float, links: Links, chunks: int) -> float:
    """Returns the most seconds that :func:`samestep.collectives.double_tree.all_reduce` takes."""
    _, _, ng = _terms(nbytes, links)
    reduce = double_tree_broadcast(ranks, nbytes, links, chunks) + _tree_rounds(ranks, chunks) * ng / (2 * chunks)
    return reduce + double_tree_broadcast(ranks, nbytes, links, chunks)


def parameter_server(ranks: int, nbytes: float, links: Links, servers: int) -> float:
    """Returns the seconds of :func:`samestep.collectives.server.all_reduce`."""
    a, nb, ng = _terms(nbytes, links)
    left = links.crowded if servers > 2 else 1  # of which each sends to several, and hears from several
    return (ranks - 1) * (2 * (a + nb / (servers * left)) + ng / servers)


def hierarchical(ranks: int, nbytes: float, links: Links) -> float:
    """Returns the seconds of :func:`samestep.collectives.hierarchical.all_reduce` with rings, at most a NIC a rank.

    >>> from samestep.network.links import Link
    >>> links = Links(Link(1e-6, 100e9), Link(5e-6, 12.5e9), local=8, nics=8)
    >>> hierarchical(100_000, 100e6, links)
    0.12875384

    Raises:
        UsageError: the hosts do not have the same number of ranks.
    """
    local = links.local or ranks
    if ranks % local:
        raise UsageError(f"{ranks} ranks cannot be {local} on each host: give a multiple of {local}")
    hosts = ranks // local
    inside, nb1 = links.inside.latency_s, nbytes / links.inside.bytes_per_s
    across, nb2 = links.across().latency_s, nbytes / links.across().bytes_per_s
    adding = nbytes / links.adding_bytes_per_s * (ranks - 1) / ranks
    return 2 * (local - 1) * (inside + nb1 / local) + 2 * (hosts - 1) * (across + nb2 / (hosts * links.nics)) + adding


def torus(rows: int, columns: int, nbytes: float, links: Links) -> float:
    """Returns the seconds of :func:`samestep.collectives.torus.all_reduce` in one direction."""
    a, nb, ng = _terms(nbytes, links)
    ranks = rows * columns
    return 2 * (rows + columns - 2) * a + (2 * nb + ng) * (ranks - 1) / ranks


def tree_broadcast(ranks: int, nbytes: float, links: Links) -> float:
    """Returns the seconds of :func:`samestep.collectives.tree.broadcast`."""
    return _height(ranks) * links.across().seconds(nbytes)


def double_tree_broadcast(ranks: int, nbytes: float, links: Links, chunks: int) -> float:
    """Returns the most seconds that :func:`samestep.collectives.double_tree.broadcast` takes."""
    return _tree_rounds(ranks, chunks) * links.across().seconds(nbytes / (2 * chunks))


def chain_broadcast(ranks: int, nbytes: float, links: Links, segments: int) -> float:
    """Returns the seconds of :func:`samestep.collectives.segmented.broadcast`."""
    rounds = ranks - 2 + segments if ranks > 1 else 0
    return rounds * links.across().seconds(nbytes / segments)


def _terms(nbytes: float, links: Links) -> tuple[float, float, float]:
    """Returns alpha, n beta and n gamma."""
    link = links.across()
    return link.latency_s, nbytes / link.bytes_per_s, nbytes / links.adding_bytes_per_s


def _fold(ranks: int, nbytes: float, links: Links) -> float:
    """What it takes to bring the ranks down to a power of two, and to tell the others afterwards."""
    if ranks & (ranks - 1) == 0:
        return 0
    a, nb, ng = _terms(nbytes, links)
    return 2 * a + 2 * nb + ng


def _tree_rounds(ranks: int, chunks: int) -> int:
    return 2 * chunks + 2 * _height(ranks) - 2 if ranks > 1 else 0


def _log2(ranks: int) -> int:
    """Rounded down."""
    return ranks.bit_length() - 1


def _height(ranks: int) -> int:
    """log2, rounded up."""
    return (ranks - 1).bit_length()
