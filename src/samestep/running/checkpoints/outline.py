"""The tensors of a checkpoint as a tree, with what is alike told once: twelve equal layers are one line. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from samestep.running.checkpoints.contents import values_of
from samestep.running.checkpoints.manifest import Manifest, bytes_of

__all__: list[str] = []

_DEEPEST = 12  # levels; a name with more dots stays in one piece behind them
_LONGEST = 24  # branches of one level that are shown


@dataclass
class TreeNode:
    """A level of names.

    Attributes:
        name: the last piece of the name, or several of them: "0 … 11".
        form: dtype and shape, where a tensor ends here.
        values: numbers in it and below.
        size: bytes in it and below.
        branches: the next level.
    """

    name: str
    form: str = ""
    values: int = 0
    size: int = 0
    branches: list[TreeNode] = field(default_factory=list)


def tensor_tree(manifest: Manifest, *, whole: bool = False) -> list[TreeNode]:
    """Returns the uppermost branches; those that are alike in one, unless the `whole` tree is asked for."""
    root: dict[str, Any] = {}
    for name, entry in manifest.tensors.items():
        here = root
        for piece in _pieces(name):
            here = here.setdefault(piece, {})
        here[""] = entry  # no piece of a name is empty
    branches = [_branch(name, level) for name, level in root.items()]
    return branches if whole else list(_shortened(branches))


def _pieces(name: str) -> list[str]:
    return [piece or "·" for piece in re.split(r"[/.]", name, maxsplit=_DEEPEST)]


def _branch(name: str, level: dict[str, Any]) -> TreeNode:
    below = [_branch(piece, further) for piece, further in level.items() if piece]
    branch = TreeNode(name, branches=below)
    if (entry := level.get("")) is not None:
        branch.form = f"{entry['dtype']} {entry['shape']}"
        branch.values, branch.size = values_of(entry), bytes_of(entry)
    branch.values += sum(one.values for one in below)
    branch.size += sum(one.size for one in below)
    return branch


def _shortened(branches: list[TreeNode]) -> Iterator[TreeNode]:
    told = [_folded(group) for group in _groups(branches)]
    yield from told[:_LONGEST]
    if rest := told[_LONGEST:]:
        count = f"… and {len(rest)} more"
        yield TreeNode(count, "", sum(one.values for one in rest), sum(one.size for one in rest))


def _groups(branches: list[TreeNode]) -> list[list[TreeNode]]:
    """Numbered branches that are alike together, where the first of them stands; any other by itself."""
    groups: dict[Any, list[TreeNode]] = {}
    for branch in branches:
        key = _shape(branch) if branch.name.isdecimal() else branch.name
        groups.setdefault(key, []).append(branch)
    return list(groups.values())


def _shape(branch: TreeNode) -> Any:
    return (branch.form, tuple((one.name, _shape(one)) for one in branch.branches))


def _folded(group: list[TreeNode]) -> TreeNode:
    first = group[0]
    below = list(_shortened(first.branches))
    if len(group) == 1:
        return TreeNode(first.name, first.form, first.values, first.size, below)
    numbers = [int(branch.name) for branch in group]
    between = "," if len(group) == 2 else " …" if numbers[-1] - numbers[0] == len(group) - 1 else f", {numbers[1]}, …"
    name = f"{first.name}{between} {numbers[-1]}"
    form = first.form or f"{len(group)} alike"
    return TreeNode(name, form, sum(one.values for one in group), sum(one.size for one in group), below)
