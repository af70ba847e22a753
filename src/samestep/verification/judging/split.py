"""Finds the lines of a script at which samples are chosen: by the number of the rank, or by what it has kept.

    data[rank::world_size]                                    the rank's part
    self.score = torch.where(self.seen > 0, self.new, ...)    by which a sampler draws its next order

The source is read, not run: names that hold the rank, and what is indexed, counted or called with them; attributes
by which a method chooses, and which another method makes of attributes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.causes import located
from samestep.verification.judging.record import Record, line_of

WHY = "the number of the rank chooses samples at this line"
SEEDED = "the number of the rank seeds the order of the samples at this line"
KEPT = "this line computes what decides which samples come, from values that each rank keeps for itself"
_RANK = re.compile(r"_?(?:global_|my_)?rank(?:_id)?|process_index", re.IGNORECASE).fullmatch
_CHOOSING = {
    *("range", "islice", "arange", "slice", "Subset", "chunk", "tensor_split", "array_split", "split", "shard", "skip"),
    *("take", "narrow", "split_dataset_by_node", "DistributedSampler"),
}
_OTHERWISE = re.compile(r"seed|generator|default_rng|Random$|print|device|init_process_group|open$|join$").search
_SEEDS = re.compile(r"manual_seed|seed|default_rng|Random|RandomState|SeedSequence").fullmatch
_STREAM = "_InfiniteConstantSampler"  # the sampler of a DataLoader over an IterableDataset


def of_samples(finding: Finding, record: Record, script: Path) -> Finding:
    """Returns a finding about samples with the line that divides them, where one line of the script does.

    It is looked for in the classes of the dataset and the sampler that a DataLoader has, and in the whole script where
    there is no DataLoader, or it loads a stream.
    """
    passes = [one for rank in record.ranks for one in rank.of("pass")]
    own = [
        one for one in passes if finding.where in {one["where"], one["made"], one["sampler_made"], line_of(one["key"])}
    ]
    classes = _classes(own)
    is_anywhere = not passes or any(one["sampler"] == _STREAM for one in own)
    try:
        tree = ast.parse(script.read_text())
    except (OSError, SyntaxError, ValueError):
        return finding
    inside = [part for part in ast.walk(tree) if isinstance(part, ast.ClassDef) and part.name in classes]
    seeds = sorted(
        {line for part in inside for line in _seeds(part)} or {*_seeds_of(tree, classes or _classes(passes))}
    )
    if finding.code == "samples-repeated" and len(seeds) == 1:
        return located(finding, f"{script}:{seeds[0]}", SEEDED)
    lines = sorted({line for part in inside for line in _lines(part)})
    lines = lines or (sorted(_lines(tree)) if is_anywhere else [])
    if not lines or lines[-1] - lines[0] >= len(lines):  # in several places
        return finding
    return located(finding, f"{script}:{lines[0]}", WHY)


def _classes(passes: Sequence[Event]) -> set[str]:
    """The classes of the datasets and the samplers of passes."""
    return {name for one in passes for name in (one["dataset"], one["sampler"], one["cut_by"]) if name is not None}


def of_kept(finding: Finding, script: Path) -> Finding:
    """Returns a finding about later samples with the line that computes what they are chosen by, where there is one.

    `finding.where` lies in a method that reads an attribute, a score of each sample say, which another method than
    `__init__` makes of others.
    """
    program, _, number = (finding.where or "").rpartition(":")
    try:
        tree = ast.parse(script.read_text()) if Path(program) == script else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return finding
    for kind in (part for part in ast.walk(tree) if isinstance(part, ast.ClassDef)):
        methods = [part for part in kind.body if isinstance(part, ast.FunctionDef)]
        for chooses in methods:
            if chooses.lineno <= int(number) <= (chooses.end_lineno or 0):
                read = _attributes(chooses)
                others = [one for one in methods if one is not chooses and one.name != "__init__"]
                lines = [line for other in others for line, name in _made_of_attributes(other) if name in read]
                return located(finding, f"{script}:{lines[0]}", KEPT) if len(lines) == 1 else finding
    return finding


def _attributes(tree: ast.AST) -> set[str]:
    return {
        part.attr
        for part in ast.walk(tree)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    }


def _made_of_attributes(method: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yields the lines of a method at which an attribute is made by a call, of attributes, and its name."""
    names = {
        target.id
        for part in ast.walk(method)
        if isinstance(part, ast.Assign) and _attributes(part.value)
        for target in part.targets
        if isinstance(target, ast.Name)
    }
    for part in ast.walk(method):
        if isinstance(part, ast.Assign) and not (isinstance(part.value, ast.Call) and _OTHERWISE(_name(part.value))):
            read = {one.id for one in ast.walk(part.value) if isinstance(one, ast.Name)}
            is_made = any(isinstance(one, ast.Call) for one in ast.walk(part.value))
            if is_made and (_attributes(part.value) or read & names):
                for target in part.targets:
                    yield from ((part.lineno, name) for name in _attributes(target))


def _seeds(tree: ast.AST) -> Iterator[int]:
    """Yields the lines of a tree at which a generator is seeded by the number of the rank."""
    for part in ast.walk(tree):
        if isinstance(part, ast.Call) and _SEEDS(_name(part.func)) and _has_rank(part.args):
            yield part.lineno


def _seeds_of(tree: ast.AST, classes: set[str]) -> Iterator[int]:
    """Yields the lines at which one of these classes is given a seed that the number of the rank is a part of."""
    made = {
        target.id
        for part in ast.walk(tree)
        if isinstance(part, ast.Assign) and _has_rank([part.value])
        for target in part.targets
        if isinstance(target, ast.Name) and "seed" in target.id
    }
    for part in ast.walk(tree):
        if isinstance(part, ast.Call) and _name(part.func) in classes:
            named = [one.value for one in part.keywords if one.arg is not None and "seed" in one.arg]
            given = {one.id for arg in (*part.args, *named) for one in ast.walk(arg) if isinstance(one, ast.Name)}
            if given & made or _has_rank(named):
                yield part.lineno


def _has_rank(parts: Iterable[ast.AST]) -> bool:
    return any(_RANK(_name(one)) for part in parts for one in ast.walk(part))


def _lines(tree: ast.AST, *, chooses: bool = False) -> Iterator[int]:
    """Yields the lines of a tree at which a rank is an index, or a number from which places are counted."""
    for part in ast.iter_child_nodes(tree):
        if isinstance(part, ast.Call) and _OTHERWISE(_name(part.func)):
            continue
        is_chosen = chooses or (isinstance(tree, ast.Subscript) and part is tree.slice)
        if is_chosen and _RANK(_name(part)):
            yield getattr(part, "lineno", 0)
            continue
        is_counted = isinstance(part, ast.BinOp) or (
            isinstance(part, ast.Compare) and not any(isinstance(one, ast.Constant) for one in part.comparators)
        )
        is_call = isinstance(part, ast.Call) and _name(part.func) in _CHOOSING
        yield from _lines(part, chooses=is_chosen or is_counted or is_call)


def _name(part: ast.AST) -> str:
    """The last word of what is called, or of a name."""
    if isinstance(part, ast.Call):
        return _name(part.func).removeprefix("get_")
    return part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else ""
