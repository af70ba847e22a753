"""Words and numbers in messages: lists of ranks."""

from __future__ import annotations

from collections.abc import Iterable

__all__: list[str] = []


def spans(ranks: Iterable[int]) -> str:
    """Returns numbers in ascending order, runs of them in short.

    >>> spans([5, 0, 1, 2])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def rank_list(ranks: Iterable[int]) -> str:
    """Returns "rank" or "ranks", and which.

    >>> rank_list([0]), rank_list([2, 0, 1])
    ('rank 0', 'ranks 0-2')
    """
    numbers = list(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {spans(numbers)}"
