"""What lies in a checkpoint directory and in each checkpoint, for whoever looks at it from outside. No torch here.

Nothing is locked, renamed or deleted: the run that owns the directory may go on saving meanwhile. What it deletes
while somebody looks is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import CheckpointError, UsageError
from samestep.running.checkpoints import identity
from samestep.running.checkpoints.directory import complete, is_complete, reason
from samestep.running.checkpoints.integrity import DamageError, ForeignError, check, read_manifest
from samestep.running.checkpoints.manifest import MANIFEST, Manifest, bytes_of
from samestep.running.checkpoints.tree import decode

__all__: list[str] = []

_OF_DATA = {"order", "samples", "seed", "shuffle", "epoch", "cursor"}  # what the state of samestep.Shards holds
_MOST_REPLAYED = 10**11  # samples, two hours; of more only the positions are looked at, and the summary says so


@dataclass(frozen=True)
class Ledger:
    """What became of the samples, as the data ledger in a checkpoint tells; `ok` is None where there is no ledger."""

    ok: bool | None
    summary: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint as it was found.

    Attributes:
        folder: where it lies.
        manifest: what it says of itself; None where that cannot be read.
        problem: why it is not what was saved; None where it is, as far as was looked.
        size: bytes of its files.
        saved: when, in seconds since 1970.
        ledgers: name of the data -> what its ledger tells, where that was asked for.
    """

    folder: Path
    manifest: Manifest | None
    problem: DamageError | None
    size: int
    saved: float
    ledgers: dict[str, Ledger] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether everything that was looked at is as it should be."""
        return self.problem is None and all(ledger.ok is not False for ledger in self.ledgers.values())


def list_checkpoints(path: Path) -> list[Path]:
    """Returns the folders of the checkpoints that `path` means, oldest first: one step folder, or all of a run.

    Raises:
        UsageError: there are none.
    """
    path = path.resolve()  # somebody's own link to a checkpoint is theirs to make; links inside are refused
    try:
        if is_complete(path.name) or (path / MANIFEST).exists():
            if not path.is_dir():
                raise UsageError(f"{path} is not there, or not a folder")
            return [path]
        folders = [path / name for name in complete(path)]
    except OSError as error:
        raise UsageError(f"{path} cannot be looked at: {_why(error)}") from error
    if not folders and not quarantined(path):
        raise UsageError(
            f"there is no checkpoint in {path}; give the directory that the run saves in, or a step's folder"
        )
    return folders


def quarantined(path: Path) -> list[str]:
    """Returns the names of what earlier runs have found damaged in the directory `path`, and put aside."""
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith("step-") and ".bad" in entry.name)


def inspect(folder: Path, *, digests: bool, progress: Callable[[int], None] | None = None) -> CheckpointInfo | None:
    """Returns the checkpoint in `folder`, examined; None if it is deleted meanwhile."""
    manifest: Manifest | None = None
    problem: DamageError | None = None
    try:
        manifest = read_manifest(folder)
        check(folder, manifest, digests=digests, progress=progress)
        if (foreign := identity.foreign(manifest.run, folder.parent)) is not None:
            problem = ForeignError(foreign)
    except DamageError as error:
        problem = error
    except CheckpointError as error:
        problem = DamageError(str(error))
    except OSError as error:
        problem = DamageError(f"it cannot be read: {reason(error)}")
    try:
        sizes = [entry.lstat().st_size for entry in folder.iterdir()]
        saved = _saved(folder)
    except OSError:
        if not folder.exists():
            return None
        sizes, saved = [], folder.lstat().st_mtime
    return CheckpointInfo(folder, manifest, problem, sum(sizes), saved)


def size_of(folder: Path) -> int:
    """Returns how many bytes there may be to read in a checkpoint; 0 if nobody can say."""
    try:
        return sum(entry.lstat().st_size for entry in folder.iterdir() if entry.name != MANIFEST)
    except OSError:
        return 0


def virtual_ranks(manifest: Manifest) -> int | None:
    """Returns how many virtual ranks a checkpoint was saved with; None without any."""
    here: Any = manifest.random
    for name in ("virtual", "ranks"):
        content = here.get("dict") if isinstance(here, dict) else None
        here = content.get(name) if isinstance(content, dict) else None
    return here if isinstance(here, int) else None


def data_positions(manifest: Manifest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and state of all data in a checkpoint."""
    for name, tree in manifest.state.items():
        content = tree.get("dict") if isinstance(tree, dict) else None
        if isinstance(content, dict) and content.keys() >= _OF_DATA:
            yield name, decode(tree, manifest.tensors)


def audit_data(manifest: Manifest) -> dict[str, Ledger]:
    """Returns what the ledger of each data in a checkpoint says of its run; every index is computed again."""
    return {name: _audited(state) for name, state in data_positions(manifest)}


def _audited(state: dict[str, Any]) -> Ledger:
    if "ledger" not in state:
        return Ledger(None, "no ledger: saved before it was kept")
    from samestep.data.audit import audit

    try:
        told = audit(state, digests=_consumed(state) <= _MOST_REPLAYED)
    except (ArithmeticError, TypeError, ValueError, LookupError) as error:  # numbers that no run has written
        return Ledger(False, f"cannot be audited: {type(error).__name__}: {str(error)[:100]}")
    return Ledger(told.ok, told.summary, told.problems)


def _consumed(state: dict[str, Any]) -> int:
    if state["samples"] is None:  # a stream that does not say how long it is: what is in its ledger
        return sum(int(row[2]) - int(row[1]) for row in state["ledger"]["segments"])
    return int(state["samples"]) * (int(state["epoch"]) + 1)


@dataclass(frozen=True)
class Part:
    """One named object in a checkpoint.

    Attributes:
        name: under which it was saved.
        kind: "module", an optimizer's class, or "object".
        tensors: how many it holds; one that two objects share counts in both.
        values: numbers in them.
        size: their bytes.
        parameters: numbers that an optimizer steers; None for anything else.
    """

    name: str
    kind: str
    tensors: int
    values: int
    size: int
    parameters: int | None


def objects(manifest: Manifest) -> list[Part]:
    """Returns the objects in a checkpoint, in the order in which they were named."""
    return [_part(name, manifest) for name in manifest.state]


def _part(name: str, manifest: Manifest) -> Part:
    about = manifest.about[name]
    entries = [manifest.tensors[tensor] for tensor in _tensors_of(manifest.state[name]) & manifest.tensors.keys()]
    return Part(
        name=name,
        kind=str(about["kind"]),
        tensors=len(entries),
        values=sum(values_of(entry) for entry in entries),
        size=sum(map(bytes_of, entries)),
        parameters=_parameters(about.get("shapes")),
    )


def values_of(entry: dict[str, Any]) -> int:
    """Returns how many numbers a tensor of the manifest has."""
    count = 1
    for length in entry["shape"]:
        count *= length
    return count


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


def _saved(folder: Path) -> float:
    path = folder / MANIFEST
    return (path if path.exists() else folder).lstat().st_mtime


def _why(error: OSError) -> str:
    return "there is no such directory" if isinstance(error, FileNotFoundError) else reason(error)
