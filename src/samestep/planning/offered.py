"""What a cluster offers: each all-reduce counted once on its network, whatever the bytes.

    rounds by rule ── ranks on hosts ── links they share ──▶ latency, and seconds a byte
      ring                    2 (p-1) rounds                 all are lines: a latency and so much a byte, so that
      halving and doubling    2 log2 p                       buckets of any size are priced at once
      recursive doubling      log2 p
      binomial tree           2 log2 p
      hierarchical            within hosts, between them, within hosts
      grid                    along rows, along columns, along rows
      one server              2

Where replicas are of several stages, all stages sum at once, each among every so-many-th rank: their messages are
counted together, and meet at the hosts' ports. Adding costs what the closed forms say, as if none of it were hidden.
Segmented rings and double trees, whose chunks depend on the bytes, are left out: they win by a part of the adding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from samestep.network import rounds
from samestep.network.cluster import Cluster
from samestep.network.contention import Cost, price
from samestep.network.links import Link
from samestep.network.placement import Placement
from samestep.network.rounds import Round, Shift
from samestep.planning.fabric import Sum

__all__: list[str] = []

Rule = Callable[[int, float], Iterable[Round | Shift]]


@dataclass(frozen=True)
class Offered:
    r"""The fabric of a cluster.

    Attributes:
        cluster: as its file says.

    Example:
        >>> from samestep.network.cluster import parse
        >>> fabric = Offered(parse('nodes.count = 8\nlinks.between = { latency = "5 us", bandwidth = "1 GB/s" }'))
        >>> print(fabric.sums(8, 1, 1e6)[0])
        Sum(name='ring', link=Link(latency_s=7e-05, bytes_per_s=571428571.0))
    """

    cluster: Cluster
    _sums: dict[tuple[int, int], list[Sum]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _hops: dict[tuple[int, int], Link] = field(default_factory=dict, init=False, repr=False, compare=False)
    _places: dict[int, Placement] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """How many there can be."""
        return self.cluster.ranks

    def sums(self, replicas: int, stages: int, nbytes: float) -> Sequence[Sum]:  # noqa: ARG002
        """Returns every algorithm's latency and bandwidth."""
        key = replicas, stages
        if key not in self._sums:
            self._sums[key] = [
                Sum(name, self._line(self.cost(rule, replicas, stages), added))
                for name, rule, added in self._rules(replicas, stages)
            ]
            self._sums[key] += self._shared(replicas * stages)
        return self._sums[key]

    def hop(self, replicas: int, stages: int) -> Link:
        """Returns what is between stages while all replicas send at once."""
        import numpy as np

        key = replicas, stages
        if key not in self._hops:
            ranks = np.arange(replicas * stages)
            senders = ranks[ranks % stages < stages - 1]
            each = Round(senders, senders + 1, np.ones(len(senders)))
            self._hops[key] = self._line(self._priced([each], replicas * stages), 0.0)
        return self._hops[key]

    def cost(self, rule: Rule, replicas: int, stages: int, nbytes: float = 1.0) -> Cost:
        """Returns what an all-reduce of all stages costs, without adding."""
        one = rule(replicas, nbytes)
        return self._priced(rounds.apart(one, stages) if stages > 1 else one, replicas * stages)

    def _shared(self, ranks: int) -> Iterator[Sum]:
        """All-reduces in the memory of the one host, whose bandwidth all ranks share."""
        shared = self.cluster.shared
        if shared is not None and ranks <= self.cluster.devices:
            yield Sum("shared memory", Link(shared.latency_s, shared.bytes_per_s / ranks))

    def _priced(self, several: Iterable[Round | Shift], ranks: int) -> Cost:
        if ranks not in self._places:
            self._places[ranks] = self.cluster.place(ranks)
        return price(several, self.cluster.topology, self._places[ranks], self.cluster.routing)

    def _line(self, cost: Cost, added: float) -> Link:
        each = cost.price.transfer_s + added / self.cluster.links.adding_bytes_per_s
        return Link(float(f"{cost.price.latency_s:.9g}"), float(f"{1 / each:.9g}") if each else float("inf"))

    def _rules(self, replicas: int, stages: int) -> Iterator[tuple[str, Rule, float]]:
        """Names, rounds, and how many times the buffer is added on a rank that does most of it."""
        bits = (replicas - 1).bit_length()
        fold = 1.0 if replicas & (replicas - 1) else 0.0
        power = 1 << (replicas.bit_length() - 1)
        yield "ring", rounds.ring, 1 - 1 / replicas
        yield "halving and doubling", rounds.halving_doubling, 1 - 1 / power + fold
        yield "recursive doubling", rounds.recursive_doubling, power.bit_length() - 1 + fold
        yield "binomial tree", rounds.binomial_tree, float(bits)
        yield "one server", rounds.parameter_server, float(replicas - 1)
        local = self.cluster.devices // stages if self.cluster.devices % stages == 0 else 1
        if 1 < local < replicas and replicas % local == 0:
            yield "hierarchical", _grid(local), 1 - 1 / replicas
        columns = _square(replicas)
        if columns > 1 and columns != local:
            yield f"grid of {replicas // columns} x {columns}", _grid(columns), 1 - 1 / replicas


def _grid(columns: int) -> Rule:
    """Ranks in rows of so many."""
    return lambda ranks, nbytes: rounds.torus(ranks // columns, columns, nbytes)


def _square(ranks: int) -> int:
    """The columns of the most nearly square grid of so many ranks; 1 if there is no grid."""
    return next(columns for columns in range(int(ranks**0.5), 0, -1) if ranks % columns == 0)
