"""Proof that a plan computes its operation, and whether all ranks end with the same bits: for all inputs at once.

Floating-point addition commutes, a + b = b + a to the last bit (IEEE 754; only which of two NaNs survives is open),
but it does not associate: (a + b) + c and a + (b + c) differ. So two sums have the same bits for all inputs if they
were bracketed alike, whatever the order inside each bracket:

    rank 0 adds     (0 + 1) + (2 + 3)      ┐
    rank 1 adds     (1 + 0) + (3 + 2)      ┘ one expression: the same bits
    rank 2 adds     (2 + 0) + (1 + 3)        another: other bits

:func:`prove` executes the plan on such expressions instead of tensors. They are written in one way, the part with the
lowest rank first, so two are equal exactly if their texts are.

A test on random numbers could only fail to find a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.collectives.plan import Plan, execute
from samestep.errors import UsageError


@dataclass(frozen=True)
class SumExpr:
    """What a rank brought, or the sum of two expressions.

    >>> a, b, c = (SumExpr.of_rank(rank, "example") for rank in range(3))
    >>> (a + b) + c == c + (b + a), (a + b) + c == a + (b + c)
    (True, False)
    >>> print(c + (b + a))
    ((0+1)+2)
    """

    text: str
    ranks: int  # whose contributions are in it, one bit each
    plan: str  # the name of it

    @classmethod
    def of_rank(cls, rank: int, plan: str) -> SumExpr:
        return cls(str(rank), 1 << rank, plan)

    def __add__(self, other: SumExpr) -> SumExpr:
        if twice := self.ranks & other.ranks:
            rank = twice.bit_length() - 1
            raise UsageError(f"{self.plan}: what rank {rank} brought is added twice: {self} and {other}")
        first, second = sorted((self, other), key=lambda part: part.ranks & -part.ranks)
        return SumExpr(f"({first}+{second})", self.ranks | other.ranks, self.plan)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Proof:
    """What was proved of a plan that computes what it says."""

    identical: bool  # all ranks that end with a block end with the same bits
    position_independent: bool  # all blocks are added in one order, so an element's bits do not depend on its place
    sums: tuple[SumExpr, ...]  # of each block, what the first rank that holds it ends with; `str` shows the brackets


def prove(plan: Plan) -> Proof:
    """Returns what holds of a plan for all inputs.

    Raises:
        UsageError: it does not compute its operation; names the first rank and block, and what they end with.

    Example:
        >>> from samestep.collectives import ring
        >>> proof = prove(ring.all_reduce(3))
        >>> proof.identical, proof.position_independent, [str(each) for each in proof.sums]
        (True, False, ['(0+(1+2))', '((0+2)+1)', '((0+1)+2)'])
    """
    ends = execute(plan, [[_brought(plan, rank, at) for at in range(plan.blocks)] for rank in range(plan.ranks)])
    by_block: list[list[SumExpr]] = [[] for _ in range(plan.blocks)]
    for rank in range(plan.ranks):
        for at in plan.held(rank):
            _check_whole(plan, rank, at, ends[rank][at])
            by_block[at].append(ends[rank][at])
    identical = all(len(set(results)) == 1 for results in by_block)
    # of an all-gather and a broadcast nothing is added, so nothing depends on the place
    copies = plan.operation in {"all_gather", "broadcast"}
    same_order = copies or all(results == by_block[0] for results in by_block)
    return Proof(identical, same_order, tuple(results[0] for results in by_block))


def _brought(plan: Plan, rank: int, at: int) -> SumExpr:
    """What a rank begins with; what an operation does not read is worth nothing, and must not be in its result."""
    begin, end = plan.share(rank) if plan.operation == "all_gather" else (0, plan.blocks)
    read = begin <= at < end and (plan.operation != "broadcast" or rank == plan.root)
    return SumExpr.of_rank(rank if read else plan.ranks + rank, plan.name)


def _check_whole(plan: Plan, rank: int, at: int, result: SumExpr) -> None:
    """Refuses what a rank ends with in one block, unless it is what the operation says."""
    if plan.operation in {"all_gather", "broadcast"}:
        source = plan.root if plan.operation == "broadcast" else at * plan.ranks // plan.blocks
        expected, words = 1 << source, f"that of rank {source}"
    else:
        expected, words = (1 << plan.ranks) - 1, f"the sum over all {plan.ranks} ranks"
    if result.ranks != expected:
        raise UsageError(f"{plan.name}: rank {rank} ends with {result} in block {at}, not with {words}")
