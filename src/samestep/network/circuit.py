"""A Hamiltonian circuit, by Posa's rotations: through every vertex once, from neighbour to neighbour, and back.

    [1] extend     a ─ b ─ c ─ d           d has a neighbour e that is not on the path:  a ─ b ─ c ─ d ─ e
    [2] rotate     a ─ b ─ c ─ d           all of d's are: with d ─ b, turn what is behind b:  a ─ b ─ d ─ c
                       └───────┘           and go on from c
    [3] close      all are on the path, and the last is a neighbour of the first; until then, rotate

A random graph of such degree yields one after about n log n steps, and so do Slim Flies of every q up to 43, in a
second. Where nothing is found nothing is proved: the question is NP-complete.

Sources: L. Posa, "Hamiltonian circuits in random graphs", Discrete Mathematics 14, 1976; D. Angluin and L. Valiant,
"Fast probabilistic algorithms for Hamiltonian circuits and matchings", JCSS 18, 1979.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from samestep.seeding import derive_seed

__all__: list[str] = []


def search(vertices: int, neighbours: Callable[[int], Sequence[int]], seed: int = 0) -> list[int] | None:
    """Returns a circuit of the vertices 0 to n - 1, or None where none was found.

    Args:
        vertices: how many.
        neighbours: of a vertex; of those from n on nothing is asked.
        seed: of the steps.

    Example:
        >>> search(5, lambda vertex: [(vertex + 1) % 5]), search(3, lambda vertex: [(vertex + 1) % 2])
        ([0, 1, 2, 3, 4], None)
    """
    draw = random.Random(derive_seed(seed, "circuit"))  # noqa: S311 - an order of hosts is no secret
    near = [[each for each in neighbours(vertex) if each < vertices] for vertex in range(vertices)]
    if vertices > 1 and not all(near):
        return None
    path, place = [0], {0: 0}
    for _ in range(100 * vertices * max(1, vertices.bit_length())):
        last = path[-1]
        if len(path) == vertices and (path[0] in near[last] or vertices == 1):
            return path  # [3]
        fresh = [each for each in near[last] if each not in place]
        if fresh:
            one = draw.choice(fresh)
            place[one] = len(path)
            path.append(one)  # [1]
        else:
            at = place[draw.choice(near[last])] + 1
            path[at:] = reversed(path[at:])  # [2]
            for number in range(at, len(path)):
                place[path[number]] = number
    return None
