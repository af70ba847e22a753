"""PowerSGD: a product of two thin matrices for each gradient.

    M   [n, m]   a rank's gradient, with its residual         P = M Q         summed over ranks, orthogonalised
    P   [n, r]   Q   [m, r]                                   Q = Mᵀ P        likewise; P Qᵀ is the mean gradient

One step of subspace iteration, begun where the last step ended. Both sums are linear, so ranks add thin matrices and
not their products. PyTorch's hook for it hangs on gloo with two buckets, and begins late.

Source: T. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from samestep.compress.codecs import Codec, is_int
from samestep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Codec):
    """A matrix of low rank for each gradient; kernels of more dims count as [first, all others].

    Args:
        rank: of the matrix: r (n + m) numbers travel for n·m; a tensor that would not halve is exempt.
    """

    rank: int = 2
    rounds: ClassVar[int] = 4
    cuts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_int(self.rank, 1):
            raise UsageError(f"rank={self.rank!r} is no rank of a matrix: give a whole number, 1 or more")

    def takes(self, shape: torch.Size) -> bool:
        rows, columns = as_matrix(shape)
        return super().takes(shape) and 2 * self.rank * (rows + columns) <= rows * columns


def as_matrix(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Returns rows and columns of a tensor taken as a matrix."""
    size = torch.Size(shape).numel()
    return (shape[0], size // max(shape[0], 1)) if shape else (1, 1)


def orthonormal(matrix: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns, [n, r] with n > r; of columns that are 0, any.

    Every rank does it by itself, and all need the same bits: Gram-Schmidt, added element by element in a fixed order.
    LAPACK's QR of 50,000 rows gives others by one thread than by two, and hosts have as many as they have cores.
    """
    columns = list(matrix.double().unbind(1))  # which holds the squares of float32's smallest numbers
    for place, column in enumerate(columns):
        columns[place] = _orthogonal_part(column, columns[:place])
    return torch.stack(columns, 1).to(matrix.dtype)


def _orthogonal_part(column: Tensor, basis: list[Tensor]) -> Tensor:
    """Returns what is left of a column without its parts along the basis, of length 1; else of a unit vector."""
    left = _without(column, basis)
    if _length(left) > 1e-12 * _length(column):
        return left / _length(left)
    for place in range(len(basis) + 1):  # of k + 1 unit vectors one keeps 1 / (k + 1) of its square beside k
        unit = torch.zeros_like(column)
        unit[place] = 1.0
        left = _without(unit, basis)
        if _length(left) ** 2 > 0.5 / (len(basis) + 1):
            break
    return left / _length(left)


def _without(column: Tensor, basis: list[Tensor]) -> Tensor:
    for _ in range(2):  # the second time what rounding has left
        for one in basis:
            column = column - one * _sum(one * column)
    return column


def _length(column: Tensor) -> float:
    return math.sqrt(_sum(column * column))


def _sum(values: Tensor) -> float:
    """The sum, by halves: the same bits by any number of threads and on any processor."""
    while len(values) > 1:
        half = -(-len(values) // 2)
        rest = values[half:]
        values = values[:half].clone()
        values[: len(rest)] += rest
    return float(values)
