"""Every plan there is, over a given number of ranks, for tests that hold of all of them."""

from __future__ import annotations

import torch

from samestep.collectives import (
    double_tree,
    doubling,
    halving,
    hierarchical,
    ring,
    segmented,
    server,
    torus,
    tree,
)


def rings(ranks):
    return [ring.all_reduce(ranks), ring.reduce_scatter(ranks), ring.all_gather(ranks)]


def segmented_rings(ranks):
    return [segmented.all_reduce(ranks, 3), segmented.reduce_scatter(ranks, 2), segmented.all_gather(ranks, 2)]


def chains(ranks):
    return [segmented.broadcast(ranks, ranks // 2, 3), segmented.reduce(ranks, ranks - 1, 3)]


def doublings(ranks):
    return [doubling.all_reduce(ranks)]


def halvings(ranks):
    return [halving.all_reduce(ranks), halving.reduce_scatter(ranks), halving.all_gather(ranks)]


def trees(ranks):
    return [tree.all_reduce(ranks), tree.broadcast(ranks, ranks - 1), tree.reduce(ranks, ranks // 2)]


def double_trees(ranks):
    return [
        double_tree.all_reduce(ranks, 3),
        double_tree.broadcast(ranks, ranks // 2, 2),
        double_tree.reduce(ranks, ranks - 1, 1),
    ]


def servers(ranks):
    return [
        server.all_reduce(ranks),
        server.all_reduce(ranks, (ranks + 1) // 2),
        server.reduce_scatter(ranks),
        server.all_gather(ranks),
        server.broadcast(ranks, ranks - 1),
        server.reduce(ranks, ranks // 2),
    ]


def hierarchies(ranks):
    local = divisor(ranks)
    return [
        hierarchical.all_reduce(ranks, local),
        hierarchical.all_reduce(ranks, local, halving.all_reduce),
        hierarchical.all_reduce(ranks, ranks // local, doubling.all_reduce),
        hierarchical.broadcast(ranks, local, ranks // 2),
    ]


def toruses(ranks):
    rows = divisor(ranks)
    columns = ranks // rows
    return [
        torus.all_reduce(rows, columns),
        torus.all_reduce(columns, rows, parts=2),
        torus.all_reduce(rows, columns, parts=4),
        torus.reduce_scatter(rows, columns),
        torus.all_gather(columns, rows),
    ]


def divisor(ranks):
    """The smallest number that divides the ranks evenly, other than 1 where there is one."""
    return next((number for number in range(2, ranks + 1) if ranks % number == 0), 1)


FAMILIES = {
    "ring": rings,
    "segmented": segmented_rings,
    "chain": chains,
    "doubling": doublings,
    "halving": halvings,
    "tree": trees,
    "double_tree": double_trees,
    "server": servers,
    "hierarchical": hierarchies,
    "torus": toruses,
}


def every_plan(ranks):
    return [plan for make in FAMILIES.values() for plan in make(ranks)]


def inputs(plan, elements, dtype=torch.int64):
    """One buffer a rank: whole numbers that a sum keeps exact, or of a floating dtype, such that every sum rounds."""
    generator = torch.Generator().manual_seed(plan.ranks * 1009 + elements)
    if dtype.is_floating_point:
        numbers = [torch.randn(elements, generator=generator, dtype=torch.float64) for _ in range(plan.ranks)]
        return [(each * 10.0 ** (rank % 5)).to(dtype) for rank, each in enumerate(numbers)]
    return [torch.randint(-1000, 1000, (elements,), generator=generator).to(dtype) for _ in range(plan.ranks)]


def expected(plan, buffers):
    """What each rank must hold after a plan: (where, what) of whole numbers, from the definition of the operation."""
    total = torch.stack(buffers).sum(0).to(buffers[0].dtype)
    edges = plan.edges(total.numel())
    shares = [slice(edges[begin], edges[end]) for begin, end in map(plan.share, range(plan.ranks))]
    everything = slice(None)
    return {
        "all_reduce": lambda: [(everything, total)] * plan.ranks,
        "reduce_scatter": lambda: [(share, total[share]) for share in shares],
        "all_gather": lambda: (
            [(everything, torch.cat([buffer[share] for buffer, share in zip(buffers, shares, strict=True)]))]
            * plan.ranks
        ),
        "broadcast": lambda: [(everything, buffers[plan.root])] * plan.ranks,
        "reduce": lambda: [
            (everything, total) if rank == plan.root else (slice(0), total[:0]) for rank in range(plan.ranks)
        ],
    }[plan.operation]()
