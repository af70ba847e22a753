"""How long a message takes: the latency and bandwidth of the links inside a host and between hosts.

    seconds of a message of n bytes = alpha + n beta          alpha: seconds a message, whatever its size
                                                              beta:  seconds a byte, 1 / bandwidth
    seconds of adding n bytes       = n gamma                 gamma: seconds a byte

        host 0                    host 1                      ranks of one host are neighbours: rank r stands on
      0   1   2   3             4   5   6   7                 host r / local
      └─inside──┘               └─inside──┘
            └── NIC ─── between ─── NIC ──┘                   what leaves or enters a host shares its NICs

The model is Hockney's (Parallel Computing 20, 1994): real networks have queues, protocols that change with the size,
and neighbours. What is lost where all exchange with all is measured, too: one ratio, as in L. A. Steffenel, "Modeling
Network Contention Effects on All-to-All Operations" (CLUSTER 2006). It orders algorithms well where latency and
bandwidth were measured on the network in question, and says little where they were read off a data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from samestep.errors import UsageError
from samestep.text import bytes_text, seconds_text


@dataclass(frozen=True)
class Link:
    """One way from a rank to another.

    Attributes:
        latency_s: alpha, seconds a message.
        bytes_per_s: 1 / beta.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or not self.bytes_per_s > 0:
            raise UsageError(
                f"a link takes {self.latency_s} s a message and carries {self.bytes_per_s} bytes/s: "
                "give a latency of 0 or more and a bandwidth above 0"
            )

    def seconds(self, nbytes: float) -> float:
        """Returns how long a message of `nbytes` takes.

        >>> Link(latency_s=20e-6, bytes_per_s=1e9).seconds(1e6)
        0.00102
        """
        return self.latency_s + nbytes / self.bytes_per_s

    def __str__(self) -> str:
        return f"{seconds_text(self.latency_s)} a message and {bytes_text(self.bytes_per_s)}/s"


@dataclass(frozen=True)
class Links:
    """The links among all ranks.

    Attributes:
        inside: from a rank to another on its host.
        between: from a rank to one on another host; where None, the same as `inside`.
        local: ranks on one host, or None where all are on one.
        adding_bytes_per_s: 1 / gamma: the bytes that a rank adds to its own in a second.
        nics: messages that can leave (and enter) a host side by side without slowing each other.
        ports: messages that a rank can send (and receive) side by side.
        crowded: the part of the bandwidth between hosts that is left to a rank which sends to several there and hears
            from several at once: they do not share a port as evenly as one message follows another.
    """

    inside: Link
    between: Link | None = None
    local: int | None = None
    adding_bytes_per_s: float = float("inf")
    nics: int = 1
    ports: int = 1
    crowded: float = 1

    def __post_init__(self) -> None:
        if not 0 < self.crowded <= 1:
            raise UsageError(f"crowded is {self.crowded}: give a part of the bandwidth, above 0 and at most 1")
        for name, number in (("local", self.local), ("nics", self.nics), ("ports", self.ports)):
            if number is not None and number < 1:
                raise UsageError(f"{name} is {number}: give 1 or more")
        if not self.adding_bytes_per_s > 0:
            raise UsageError(f"a rank adds {self.adding_bytes_per_s} bytes/s: give a number above 0")
        if self.between is not None and self.local is None:
            raise UsageError("there is a link between hosts, but not how many ranks are on each: give local=")

    def across(self) -> Link:
        """Returns the link between hosts, or the only one there is."""
        return self.inside if self.between is None else self.between

    def __str__(self) -> str:
        parts = [f"inside a host {self.inside}" if self.between else f"{self.inside}"]
        if self.between:
            parts.append(f"between hosts of {self.local} ranks {self.between}")
        if self.adding_bytes_per_s < float("inf"):
            parts.append(f"adding {bytes_text(self.adding_bytes_per_s)}/s")
        if self.crowded < 1:
            parts.append(f"{self.crowded:.0%} of the bandwidth where all hosts exchange with several at once")
        return ", ".join(parts)


def fit(samples: Sequence[tuple[float, float]]) -> Link:
    """Returns the link that explains measured (bytes, seconds) best, in relative terms.

    Least sum of |log((alpha + beta n) / t)|, over the lines through two of the points: a small message counts as much
    as a large one, though its seconds are few, and a size that has a way of its own, such as one that fits into what a
    network lets pass at once, is left aside rather than met half-way. Neither figure is ever negative.

    Args:
        samples: two sizes or more.

    Raises:
        UsageError: fewer than two different sizes, or a time that is not above 0.

    Example:
        >>> fit([(0, 20e-6), (1e6, 1.02e-3), (2e6, 2.02e-3)])
        Link(latency_s=2e-05, bytes_per_s=1000000000.0)
        >>> fit([(0, 20e-6), (1e5, 20e-6), (1e6, 1.02e-3), (2e6, 2.02e-3)])  # small ones pass at once
        Link(latency_s=2e-05, bytes_per_s=1000000000.0)
    """
    if len({nbytes for nbytes, _ in samples}) < 2 or any(not seconds > 0 for _, seconds in samples):
        raise UsageError(f"a link needs times above 0 of two sizes or more, got {list(samples)}")
    alpha, beta = min(_lines(samples), key=lambda line: _deviation(line, samples))
    return Link(float(f"{alpha:.6g}"), float(f"{1 / beta:.6g}") if beta > 0 else float("inf"))


def _lines(samples: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yields (alpha, beta) of the lines through two of the points, or through one where the other would be negative."""
    for n, t in samples:
        yield t, 0.0
        if n:
            yield 0.0, t / n
    for (n, t), (m, u) in combinations(samples, 2):
        if n != m:
            beta = (u - t) / (m - n)
            if beta >= 0 and t - beta * n >= 0:
                yield t - beta * n, beta


def _deviation(line: tuple[float, float], samples: Sequence[tuple[float, float]]) -> float:
    alpha, beta = line
    return sum(abs(math.log((alpha + beta * n) / t)) if alpha + beta * n else math.inf for n, t in samples)
