"""A backward in two parts: gradients of a stage's inputs now, those of its weights later, without doing work twice.

    x ──▶ Mul ──▶ Add ──▶ out          nodes between outputs and inputs:                       Add, Mul
           ▲       ▲                   intermediates, where a weight's branch meets them:      Mul (w), Add (b)
           w       b

The first part keeps the gradients that reach each intermediate; the second starts there. Autograd computes only the
gradients of a node that are asked for, so a matrix product is done once for the input and once for the weight, as in a
whole backward.

Source of the schedule that needs this: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. torch's pipelines
split by the same graph (torch.distributed.pipelining, torch 2.13).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


@dataclass(eq=False)
class SplitBackward:
    """The backward of one micro-batch, in two parts."""

    outputs: Sequence[Tensor]  # where gradients come in
    gradients: Sequence[Tensor | None]  # of these; None for a scalar
    inputs: Sequence[Tensor]  # whose gradients the first part computes
    weights: Sequence[Tensor]  # whose gradients the second part adds to `.grad`

    def __post_init__(self) -> None:
        self._kept: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]] = []  # of an intermediate: its weights
        self._from_outputs = self.weights  # weights for which the second part goes through the whole graph

    def backward_input(self) -> list[Tensor | None]:
        """Returns the gradients of the inputs; None where no output depends on one."""
        if not self.inputs or not self.outputs:
            return [None] * len(self.inputs)
        intermediates = self._intermediates()
        arrived: dict[Node, Sequence[Tensor | None]] = {}

        def keep(node: Node) -> Any:
            return node.register_prehook(lambda gradients: arrived.__setitem__(node, gradients))

        handles = [keep(node) for node in intermediates]
        try:
            found = torch.autograd.grad(self.outputs, self.inputs, self.gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for node, weights in intermediates.items():
            pairs = [(place, each) for place, each in enumerate(arrived.get(node, ())) if each is not None]
            if pairs:
                edges = [GradientEdge(node, place) for place, _ in pairs]
                self._kept.append((edges, [each for _, each in pairs], weights))
        return list(found)

    def backward_weight(self) -> None:
        for edges, gradients, weights in self._kept:  # one by one: beyond one intermediate lie the weights of others
            torch.autograd.backward(edges, gradients, retain_graph=bool(self._from_outputs), inputs=weights)
        if self._from_outputs and self.outputs:
            torch.autograd.backward(self.outputs, self.gradients, inputs=self._from_outputs)

    def _intermediates(self) -> dict[Node, list[Tensor]]:
        """Returns the nodes that lead both to inputs and, by another edge, to weights, with these weights.

        A weight that is reached from one intermediate gets its gradient from there. One that is reached from several is
        used several times, and one that is reached past all of them is not beside the inputs: for these the second part
        goes through the whole graph, since a sum in another order has other bits.
        """
        roots = [node for each in self.outputs if (node := each.grad_fn) is not None]
        order = _topological_order(roots)
        leaves = {_leaf(each): each for each in self.weights}
        ends = {_leaf(each) for each in self.inputs}
        to_inputs: set[Node] = set()
        for node in order:
            if node in ends or any(other in to_inputs for other in _next(node)):
                to_inputs.add(node)
        to_weights: dict[Node, set[Node]] = {}  # leaves reached from nodes that do not lead to inputs
        for node in order:
            if node not in to_inputs:
                reached = set[Node]().union(*(to_weights[other] for other in _next(node)))
                to_weights[node] = {node} if node in leaves else reached
        reached_from: defaultdict[Node, list[Node]] = defaultdict(list)  # by leaf
        for node in order:
            if node in to_inputs:
                for leaf in {leaf for other in _next(node) if other not in to_inputs for leaf in to_weights[other]}:
                    reached_from[leaf].append(node)
        past = {leaf for root in roots if root not in to_inputs for leaf in to_weights[root]}
        once = {leaf for leaf, nodes in reached_from.items() if len(nodes) == 1 and leaf not in past}
        whole = (reached_from.keys() | past) - once
        self._from_outputs = [each for leaf, each in leaves.items() if leaf in whole]
        found: dict[Node, list[Tensor]] = {}
        for leaf, each in leaves.items():
            if leaf in once:
                found.setdefault(reached_from[leaf][0], []).append(each)
        return found


def _next(node: Node) -> list[Node]:
    return [other for other, _ in node.next_functions if other is not None]


def _leaf(tensor: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _topological_order(roots: Iterable[Node]) -> list[Node]:
    """Returns all nodes reached from some, each after those that it leads to; not recursive, since graphs are deep."""
    found: dict[Node, None] = {}
    entered: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            found.setdefault(node)
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack += [(other, False) for other in _next(node) if other not in entered]
    return list(found)
