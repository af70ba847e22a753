"""What lies in a checkpoint directory and in each checkpoint, for whoever looks at it from outside. No torch here.

Nothing is locked, renamed or deleted: the run that owns the directory may go on saving meanwhile. What it deletes
while somebody looks is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.checkpoints.directory import complete, foreign_run, is_complete, os_error_text
from samestep.checkpoints.integrity import DamageError, ForeignError, check, read_manifest
from samestep.checkpoints.manifest import MANIFEST, Manifest, bytes_of, decode, values_of
from samestep.errors import CheckpointError, UsageError

_OF_DATA = {"order", "samples", "seed", "shuffle", "epoch", "cursor"}  # what the state of samestep.Shards holds
_MOST_REPLAYED = 10**11  # samples, two hours; of more only the positions are looked at, and the summary says so
_DEEPEST = 12  # levels of the tree of tensors; a name with more dots stays in one piece below them
_LONGEST = 24  # branches of one level that are shown


@dataclass(frozen=True)
class DataAudit:
    """What became of the samples, as the data ledger in a checkpoint says; `ok` is None where there is no ledger."""

    ok: bool | None
    summary: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint as it was found; `audits` is what the ledger of each data says, where that was asked for."""

    folder: Path  # where it lies
    manifest: Manifest | None  # what it says of itself; None where that cannot be read
    problem: DamageError | None  # why it is not what was saved; None where it is, as far as was looked
    size: int  # bytes of its files
    saved: float  # when, in seconds since 1970
    audits: dict[str, DataAudit] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """Whether everything that was looked at is as it should be."""
        return self.problem is None and all(audit.ok is not False for audit in self.audits.values())


def list_checkpoints(path: Path) -> list[Path]:
    """Returns the folders of the checkpoints that `path` means, oldest first: one step folder, or all of a run."""
    path = path.resolve()  # somebody's own link to a checkpoint is theirs to make; links inside are refused
    try:
        if is_complete(path.name) or (path / MANIFEST).exists():
            if not path.is_dir():
                raise UsageError(f"{path} is not there, or not a folder")
            return [path]
        folders = [path / name for name in complete(path)]
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = "there is no such directory" if missing else os_error_text(error)
        raise UsageError(f"{path} cannot be looked at: {why}") from error
    if not folders and not quarantined(path):
        raise UsageError(
            f"there is no checkpoint in {path}; give the directory that the run saves in, or a step's folder"
        )
    return folders


def quarantined(path: Path) -> list[str]:
    """Returns the names of what earlier runs have found damaged in the directory `path`, and quarantined."""
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith("step-") and ".bad" in entry.name)


def inspect(folder: Path, *, digests: bool, progress: Callable[[int], None] | None = None) -> CheckpointInfo | None:
    """Returns the checkpoint in `folder`, examined; None if it is deleted meanwhile."""
    manifest: Manifest | None = None
    problem: DamageError | None = None
    try:
        manifest = read_manifest(folder)
        check(folder, manifest, digests=digests, progress=progress)
        if (foreign := foreign_run(manifest.run, folder.parent)) is not None:
            problem = ForeignError(foreign)
    except DamageError as error:
        problem = error
    except CheckpointError as error:
        problem = DamageError(str(error))
    except OSError as error:
        problem = DamageError(f"it cannot be read: {os_error_text(error)}")
    try:
        size = sum(entry.lstat().st_size for entry in folder.iterdir())
        path = folder / MANIFEST
        saved = (path if path.exists() else folder).lstat().st_mtime
    except OSError:
        if not folder.exists():
            return None
        size, saved = 0, folder.lstat().st_mtime
    return CheckpointInfo(folder, manifest, problem, size, saved)


def size_of(folder: Path) -> int:
    """Returns how many bytes there may be to read in a checkpoint; 0 if nobody can say."""
    try:
        return sum(entry.lstat().st_size for entry in folder.iterdir() if entry.name != MANIFEST)
    except OSError:
        return 0


def virtual_ranks(manifest: Manifest) -> int | None:
    here: Any = manifest.extra
    for name in ("virtual", "ranks"):
        content = here.get("dict") if isinstance(here, dict) else None
        here = content.get(name) if isinstance(content, dict) else None
    return here if isinstance(here, int) else None


def data_positions(manifest: Manifest) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, tree in manifest.state.items():
        content = tree.get("dict") if isinstance(tree, dict) else None
        if isinstance(content, dict) and content.keys() >= _OF_DATA:
            yield name, decode(tree, manifest.tensors)


def audit_data(manifest: Manifest) -> dict[str, DataAudit]:
    """Returns what the ledger of each data in a checkpoint says of its run; every index is computed again."""
    return {name: _audit(state) for name, state in data_positions(manifest)}


def _audit(state: dict[str, Any]) -> DataAudit:
    if "ledger" not in state:
        return DataAudit(None, "no ledger: saved before it was kept")
    from samestep.data.audit import audit

    try:
        found = audit(state, digests=_consumed(state) <= _MOST_REPLAYED)
    except (ArithmeticError, TypeError, ValueError, LookupError) as error:  # numbers that no run has written
        return DataAudit(False, f"cannot be audited: {type(error).__name__}: {str(error)[:100]}")
    return DataAudit(found.ok, found.summary, found.problems)


def _consumed(state: dict[str, Any]) -> int:
    if state["samples"] is None:  # a stream that does not say how long it is: what is in its ledger
        return sum(int(row[2]) - int(row[1]) for row in state["ledger"]["segments"])
    return int(state["samples"]) * (int(state["epoch"]) + 1)


# --- objects ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectInfo:
    name: str  # under which it was saved
    kind: str  # "module", an optimizer's class, or "object"
    tensors: int  # how many it holds; one that two objects share counts in both
    values: int  # numbers in them
    size: int  # their bytes
    parameters: int | None  # numbers that an optimizer updates; None for anything else


def objects(manifest: Manifest) -> list[ObjectInfo]:
    """Returns the objects in a checkpoint, in the order in which they were named."""
    found = []
    for name, tree in manifest.state.items():
        about = manifest.about[name]
        entries = [manifest.tensors[tensor] for tensor in _tensors_of(tree) & manifest.tensors.keys()]
        values, size = sum(map(values_of, entries)), sum(map(bytes_of, entries))
        found.append(ObjectInfo(name, str(about["kind"]), len(entries), values, size, _parameters(about.get("shapes"))))
    return found


def _parameters(shapes: Any) -> int | None:
    try:
        return sum(values_of({"shape": shape}) for group in shapes for shape in group)
    except TypeError:
        return None


def _tensors_of(tree: Any) -> set[str]:
    """The names of all tensors in a tree; without recursion, since the tree may be a stranger's."""
    names, rest = set(), [tree]
    while rest:
        here = rest.pop()
        if isinstance(here, list):
            rest += here
        elif isinstance(here, dict):
            rest += here.values()
            names |= {value for key, value in here.items() if key in {"tensor", "array"} and isinstance(value, str)}
    return names


# --- tensors as a tree, in which twelve equal layers are one line --------------------------------------------


@dataclass
class TreeNode:
    name: str  # the last piece of the name, or several of them: "0 … 11"
    form: str = ""  # dtype and shape, where a tensor ends here
    values: int = 0  # numbers in it and below
    size: int = 0  # bytes in it and below
    branches: list[TreeNode] = field(default_factory=list)  # the next level


def tensor_tree(manifest: Manifest, *, expand: bool = False) -> list[TreeNode]:
    """Returns the uppermost branches; those that are equal in one, unless they are to be expanded."""
    root: dict[str, Any] = {}
    for name, entry in manifest.tensors.items():
        here = root
        for piece in re.split(r"[/.]", name, maxsplit=_DEEPEST):
            here = here.setdefault(piece or "·", {})
        here[""] = entry  # no piece of a name is empty
    branches = [_branch(name, level) for name, level in root.items()]
    return branches if expand else _shortened(branches)


def _branch(name: str, level: dict[str, Any]) -> TreeNode:
    below = [_branch(piece, further) for piece, further in level.items() if piece]
    branch = _sum(name, "", below, below)
    if (entry := level.get("")) is not None:
        branch.form = f"{entry['dtype']} {entry['shape']}"
        branch.values, branch.size = branch.values + values_of(entry), branch.size + bytes_of(entry)
    return branch


def _sum(name: str, form: str, nodes: list[TreeNode], branches: list[TreeNode]) -> TreeNode:
    return TreeNode(name, form, sum(one.values for one in nodes), sum(one.size for one in nodes), branches)


def _shortened(branches: list[TreeNode]) -> list[TreeNode]:
    groups: dict[Any, list[TreeNode]] = {}  # numbered branches that are equal, where the first of them stands
    for branch in branches:
        groups.setdefault(_shape(branch) if branch.name.isdecimal() else branch.name, []).append(branch)
    shown = [_folded(group) for group in groups.values()]
    rest = shown[_LONGEST:]
    return [*shown[:_LONGEST], _sum(f"… and {len(rest)} more", "", rest, [])] if rest else shown


def _shape(branch: TreeNode) -> Any:
    return (branch.form, tuple((one.name, _shape(one)) for one in branch.branches))


def _folded(group: list[TreeNode]) -> TreeNode:
    first = group[0]
    if len(group) == 1:
        return TreeNode(first.name, first.form, first.values, first.size, _shortened(first.branches))
    numbers = [int(branch.name) for branch in group]
    between = "," if len(group) == 2 else " …" if numbers[-1] - numbers[0] == len(group) - 1 else f", {numbers[1]}, …"
    name = f"{first.name}{between} {numbers[-1]}"
    return _sum(name, first.form or f"{len(group)} alike", group, _shortened(first.branches))
