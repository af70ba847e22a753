"""The two halves of a backward: gradients of a stage's inputs now, those of its weights later, no work done twice.

    x ──▶ Mul ──▶ Add ──▶ out          on the way from the outputs to the inputs:  Add, Mul          the first half
           ▲       ▲                   joints, where that way meets a weight's:    Mul (w), Add (b)
           w       b                   from each joint to its weights alone:                         the second half

In the first half the gradients that come to each joint are kept; the second starts there. Autograd computes of a joint
only what is asked for, so a matrix product is done once for the input and once for the weight, as in a whole backward.

Source of the schedule that wants this: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. torch's pipelines
split by the same graph (torch.distributed.pipelining, torch 2.13).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__: list[str] = []


class Halves:
    """A backward in two halves, of one micro-batch.

    Args:
        outputs: that gradients come to.
        gradients: of these; None for a scalar.
        inputs: whose gradients are wanted first.
        weights: whose gradients are added to `.grad` by the second half.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        self._outputs, self._gradients = list(outputs), list(gradients)
        self._inputs, self._weights = list(inputs), list(weights)
        self._kept: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]] = []  # of a joint, with its weights
        self._whole = self._weights  # those for which the second half goes all the way

    def first(self) -> list[Tensor | None]:
        """Returns the gradients of the inputs; None where nothing depends on one."""
        if not self._inputs or not self._outputs:
            return [None] * len(self._inputs)
        joints = self._joints()
        came: dict[Node, Sequence[Tensor | None]] = {}

        def keeper(node: Node) -> Any:
            return node.register_prehook(lambda gradients: came.__setitem__(node, gradients))

        handles = [keeper(node) for node in joints]
        try:
            found = torch.autograd.grad(
                self._outputs, self._inputs, self._gradients, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        for node, weights in joints.items():
            pairs = [(place, each) for place, each in enumerate(came.get(node, ())) if each is not None]
            if pairs:
                edges = [GradientEdge(node, place) for place, _ in pairs]
                self._kept.append((edges, [each for _, each in pairs], weights))
        return list(found)

    def second(self) -> None:
        """Adds to the weights' gradients."""
        for edges, gradients, weights in self._kept:  # one by one: beyond a joint lie the weights of others
            torch.autograd.backward(edges, gradients, retain_graph=bool(self._whole), inputs=weights)
        if self._whole and self._outputs:
            torch.autograd.backward(self._outputs, self._gradients, inputs=self._whole)

    def _joints(self) -> dict[Node, list[Tensor]]:
        """Returns the nodes that lead both to inputs and, by another edge, to weights, with these weights.

        A weight to which the way leads from one joint is found from there. One of several joints is used several
        times, and one that is reached past all joints does not lie beside the inputs: for these the second half goes
        all the way, since a sum in another order has other bits.
        """
        roots = [node for each in self._outputs if (node := each.grad_fn) is not None]
        order = _in_order(roots)
        leaves = {_leaf(each): each for each in self._weights}
        ends = {_leaf(each) for each in self._inputs}
        leads: set[Node] = set()  # to inputs
        for node in order:
            if node in ends or any(other in leads for other in _next(node)):
                leads.add(node)
        joints_of: defaultdict[Node, list[Node]] = defaultdict(list)  # of a weight's leaf
        ways: dict[Node, set[Node]] = {}  # to weights, past no node that leads to inputs
        for node in order:
            if node not in leads:
                ways[node] = {node} if node in leaves else set().union(*(ways[other] for other in _next(node)))
        for node in order:
            if node in leads:
                for leaf in {leaf for other in _next(node) if other not in leads for leaf in ways[other]}:
                    joints_of[leaf].append(node)
        past = {leaf for root in roots if root not in leads for leaf in ways[root]}
        once = {leaf for leaf, joints in joints_of.items() if len(joints) == 1 and leaf not in past}
        reached = (joints_of.keys() | past) - once
        self._whole = [each for leaf, each in leaves.items() if leaf in reached]
        found: dict[Node, list[Tensor]] = {}
        for leaf, each in leaves.items():
            if leaf in once:
                found.setdefault(joints_of[leaf][0], []).append(each)
        return found


def _next(node: Node) -> list[Node]:
    return [other for other, _ in node.next_functions if other is not None]


def _leaf(tensor: Tensor) -> Node:
    """Returns the node that ends the way to a leaf."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _in_order(roots: Iterable[Node]) -> list[Node]:
    """Returns all nodes behind some, each after those that it leads to; without recursion, since graphs are deep."""
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
