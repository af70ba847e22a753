"""What to change next, and what it would give: every change is predicted as the plan itself was.

    change                              the plan with
      load samples beside the step        no waiting for data
      a network of twice the bandwidth    twice that of all links
      …
                                        gain: samples a second then over those of now, with as many ranks

A change is of the set-up, unless it says that the training is another one: then it is told last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from samestep.network.links import Link
from samestep.planning.fabric import Fabric, Sum
from samestep.planning.profile import Profile
from samestep.planning.search import Planner
from samestep.planning.step import Step

__all__: list[str] = []

WORTH = 0.02  # of the samples a second, below which a change is not told
CODES = 32  # bits of a gradient over bits of its code and its share of a scale: Int8's 8 and 32 / 256
CODE_BITS = 8.125
PASSES = 6  # over each gradient, to encode it and to decode it, each as slow as adding


@dataclass(frozen=True)
class Change:
    """Something that could be changed.

    Attributes:
        what: to do, in words.
        step: as it would be then.
        gain: samples a second then, over those of now, less 1.
        same: whether it stays the same training.
    """

    what: str
    step: Step
    gain: float
    same: bool = True

    def __str__(self) -> str:
        another = "" if self.same else " (another training)"
        return f"{self.what}: {100 * self.gain:+.0f} %{another}"


@dataclass(frozen=True)
class Altered:
    """A fabric whose links are better, or whose sums carry less.

    Attributes:
        fabric: as it is.
        latency: times that of the links.
        bandwidth: likewise.
        bytes_each: sent for each byte of a gradient.
        coding_s: seconds a byte to encode and decode.
    """

    fabric: Fabric
    latency: float = 1.0
    bandwidth: float = 1.0
    bytes_each: float = 1.0
    coding_s: float = 0.0

    @property
    def ranks(self) -> int:
        """How many there can be."""
        return self.fabric.ranks

    def sums(self, replicas: int, stages: int, nbytes: float) -> Sequence[Sum]:
        """Returns the altered ones."""
        return [Sum(one.name, self._sum(one.link)) for one in self.fabric.sums(replicas, stages, nbytes)]

    def hop(self, replicas: int, stages: int) -> Link:
        """Returns the altered one."""
        link = self.fabric.hop(replicas, stages)
        return Link(link.latency_s * self.latency, link.bytes_per_s * self.bandwidth)

    def _sum(self, link: Link) -> Link:
        each = self.bytes_each / (link.bytes_per_s * self.bandwidth) + self.coding_s
        return Link(link.latency_s * self.latency, 1 / each if each else float("inf"))


def changes(planner: Planner, ranks: int, adding_bytes_per_s: float = float("inf")) -> list[Change]:
    """Returns what would help with so many ranks, the greatest gain first, other trainings last.

    Args:
        planner: as it is.
        ranks: that are used.
        adding_bytes_per_s: of a rank, which says what encoding takes.
    """
    found: list[Change] = []
    for what, other, same in _others(planner, adding_bytes_per_s):
        found += compared(what, planner, other(), ranks, same=same)
    return ordered(found)


def ordered(found: Sequence[Change]) -> list[Change]:
    """Returns changes, the greatest gain first, other trainings last."""
    return sorted(found, key=lambda one: (not one.same, -one.gain))


def compared(what: str, planner: Planner, other: Planner, ranks: int, *, same: bool = True) -> Iterator[Change]:
    """Yields the change to another planner, if it is worth while with so many ranks."""
    now, then = planner.at(ranks).best, other.at(ranks).best
    if now is not None and then is not None and then.rate > (1 + WORTH) * now.rate:
        yield Change(what, then, then.rate / now.rate - 1, same)


def compressed(planner: Planner, adding_bytes_per_s: float) -> Planner:
    """Returns the planner with gradients of 8 bits, whose coding costs PASSES of so many bytes a second."""
    coding = PASSES / adding_bytes_per_s
    return replace(planner, fabric=Altered(planner.fabric, bytes_each=CODE_BITS / CODES, coding_s=coding))


def _others(planner: Planner, adding: float) -> Iterator[tuple[str, Callable[[], Planner], bool]]:
    profile, fabric = planner.profile, planner.fabric
    yield "load samples beside the step (workers=)", lambda: _with(planner, replace(profile, data_s=0.0)), True
    yield "a network of twice the bandwidth", lambda: replace(planner, fabric=Altered(fabric, bandwidth=2)), True
    yield "a network of half the latency", lambda: replace(planner, fabric=Altered(fabric, latency=0.5)), True
    yield "devices twice as quick", lambda: replace(planner, speed=2 * planner.speed), True
    if profile.other_s > 0:
        yield (
            "leave out what the script does beside model, data and optimizer",
            lambda: _with(planner, replace(profile, other_s=0.0)),
            True,
        )
    yield 'gradients of 8 bits (compress="int8")', lambda: compressed(planner, adding), False
    yield "a batch twice as large", lambda: replace(planner, times=2 * planner.times), False


def _with(planner: Planner, profile: Profile) -> Planner:
    return replace(planner, profile=profile)
