"""A product of two thin matrices for each gradient.

    M   [n, m]   a rank's gradient, with what it owes         P = M Q         summed over ranks, orthogonalised
    P   [n, r]   Q   [m, r]                                   Q = Mᵀ P        likewise; P Qᵀ is the mean gradient

One step of subspace iteration, begun where the last step ended. Both sums are linear, so ranks add thin matrices and
not their products. PyTorch's hook for it stands still on gloo with two buckets, and begins late.

Source: T. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.compress.codec import Codec
from samestep.errors import UsageError

__all__ = ["PowerSGD"]

_NOTHING = 1e-12  # of a column's length


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Codec):
    """A matrix of low rank for each gradient; kernels of more dims count as [first, all others].

    Args:
        rank: of the matrix: r (n + m) numbers travel for n·m; a tensor that would not halve is exempt.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise UsageError(f"rank={self.rank!r} is no rank of a matrix: give a whole number, 1 or more")

    @property
    def rounds(self) -> int:
        """How many messages a sum takes."""
        return 4

    @property
    def cuts(self) -> bool:
        """Whether a tensor may be cut into pieces."""
        return False

    def takes(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape is compressed."""
        rows, columns = as_matrix(shape)
        return super().takes(shape) and 2 * self.rank * (rows + columns) <= rows * columns


def as_matrix(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Returns rows and columns of a tensor taken as a matrix."""
    size = torch.Size(shape).numel()
    return (shape[0], size // max(shape[0], 1)) if shape else (1, 1)


def first_guess(columns: int, rank: int, seed: int) -> Tensor:
    """Returns a Q to begin with, [columns, rank], the same on every rank."""
    return torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed))


def orthonormal(matrix: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns, [n, r] with n > r; of columns that are 0, any.

    Every rank does it by itself, and all need the same bits: Gram-Schmidt, added element by element in a fixed order.
    LAPACK's QR of 50,000 rows gives others by one thread than by two, and hosts have as many as they have cores.
    """
    columns = list(matrix.double().unbind(1))  # the squares of float32's smallest numbers have a place there
    for place, column in enumerate(columns):
        columns[place] = _beside(column, columns[:place])
    return torch.stack(columns, 1).to(matrix.dtype)


def _beside(column: Tensor, basis: list[Tensor]) -> Tensor:
    """What is left of a column without its parts along an orthonormal basis, of length 1; else of a unit vector."""
    left, whole = _without(column, basis), _length(column)
    if _length(left) > _NOTHING * whole:
        return left / _length(left)
    for place in range(len(basis) + 1):  # of k + 1 unit vectors one keeps 1 / (k + 1) of its square beside k
        unit = torch.zeros_like(column)
        unit[place] = 1.0
        left = _without(unit, basis)
        if _length(left) ** 2 > 0.5 / (len(basis) + 1):
            break
    return left / _length(left)


def _without(column: Tensor, basis: list[Tensor]) -> Tensor:
    for _ in range(2):  # what the first time leaves for want of digits
        for one in basis:
            column = column - one * _added(one * column)
    return column


def _length(column: Tensor) -> float:
    return math.sqrt(_added(column * column))


def _added(values: Tensor) -> float:
    """The sum, by halves: the same bits by any number of threads and on any processor."""
    while len(values) > 1:
        half = -(-len(values) // 2)
        rest = values[half:]
        values = values[:half].clone()
        values[: len(rest)] += rest
    return float(values)
