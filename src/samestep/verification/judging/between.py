"""What a script does to compressed gradients between backward and step, which they are compared before.

    ranks    ā ── times f ──► u        alone    g ── times h ──► v

Nothing, mostly: u is ā, to the bit. Clipping by the norm makes both shorter, each by its own factor, since ā is not g:

    f = h               the same is done to both
    |u| = |v|           both are cut to one norm
    f = 1, |u| ≤ |v|    only what one process has is too long; h = 1, |u| ≥ |v| the other way round

Any other factor is a mistake, such as a second division by the number of ranks. What is no factor is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.judging.single import Run

__all__: list[str] = []

_NEAR = 1e-3  # of a factor, and of a norm
_NO_FACTOR = "between backward and step the script changes compressed gradients, and not by a factor"


@dataclass
class Between:
    """Of the ranks, and of the script alone.

    Attributes:
        record: of the ranks.
        whole: the script alone.
        why_not: why it cannot be said that both do the same, once that is known.
    """

    record: Record
    whole: Run
    why_not: str | None = None

    def findings(self, steps: Sequence[Event]) -> Iterator[Finding]:
        """Yields the first step at which the ranks' factor is none that one process explains."""
        for step in steps:
            if step["event"] not in self.whole.steps or (theirs := self.whole.used(step["event"])) is None:
                continue
            got = dict(zip(step["gradients"], self.record.compressed(step).got(), strict=True))
            mine = _change(got, self.record.used(step))
            alone = _change(self.whole.gradients(step["event"]), theirs)
            if mine.factor is None or alone.factor is None:
                self.why_not = _NO_FACTOR
            elif not _explained(mine.factor, mine.norm, alone.factor, alone.norm):
                yield _finding(step, mine.factor, alone.factor)
                return


@dataclass(frozen=True)
class _Change:
    """By which factor gradients become those that the optimizer uses, None if by none; the norm of these."""

    factor: float | None
    norm: float


def _change(before: Any, used: Any) -> _Change:
    one, other = numerics.flat(before, used), numerics.flat(used, before)
    norm = float(other.norm())
    if bool((one == other).all()):
        return _Change(1.0, norm)
    found = numerics.fit(other, [one])
    return _Change(found.factors[0] if found.left <= numerics.limit(0.0, used) else None, norm)


def _explained(mine: float, norm: float, alone: float, its_norm: float) -> bool:
    if _near(mine, alone):
        return True
    if mine < 1 and alone < 1:
        return _near(norm, its_norm)
    return (_near(mine, 1) and alone < 1 and norm <= its_norm) or (_near(alone, 1) and mine < 1 and norm >= its_norm)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * abs(other)


def _finding(step: Event, mine: float, alone: float) -> Finding:
    times = mine / alone if alone else mine
    return Finding(
        code="gradient-scale",
        step=step["event"],
        factor=round(times, 6),
        where=step["where"],
        cause=f"at step {step['event']} the optimizer gets {mine:.4g} times the averaged gradient, and in one process "
        f"{alone:.4g} times what the loss brings: between backward and step it is multiplied by what it should not be",
        fix="leave averaged gradients as they are: they are divided by the number of ranks already",
    )
