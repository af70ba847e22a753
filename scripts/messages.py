"""Writes docs/messages.md: every message of samestep's errors, by what it is about. `--check` only compares.

The messages are read from the sources: whatever is given to a class of `errors.py`, with `…` for what a run fills in. A
message says by itself what is wrong and what to do next; an area adds how such a thing comes about, and where to read.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from generated import written

from samestep import errors

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "samestep"
PAGE = ROOT / "docs" / "messages.md"
FILLED = "…"
CLASSES = set(errors.__all__)
KEPT = 3  # words of a text, below which it says nothing by itself

BEGIN = """# Every message

<!-- written by scripts/messages.py; `make readme` brings it up to date -->

What samestep's errors say, by what they are about; `…` stands for what a run fills in: a name, a number, a path. The
page's search, or the browser's, finds a message by any words of it. Each says what is wrong and what to do next; the
sentences above a table say how such errors come about and where to read more, and the error's class has an entry of its
own: [codes and errors](codes.md#errors).

What `samestep verify` finds stands in [findings](codes.md#findings), what the launcher says of hangs and slow ranks in
[launching](launching.md#hangs), what torch, gloo and the kernel say in [by
symptom](symptoms.md#it-stops-with-an-error).
"""


@dataclass(frozen=True)
class Area:
    """What a group of messages is about.

    Attributes:
        title: of its part of the page.
        where: folders and files of the sources; the longest that fits counts.
        told: how such errors come about, and what fixes them.
    """

    title: str
    where: tuple[str, ...]
    told: str


AREAS = (
    Area(
        "Commands and their options",
        ("cli/", "bench/", "files.py"),
        "An option that is unknown, lacks its value, contradicts another, or names what is not there. Nothing has been "
        "started yet. `samestep COMMAND --help` lists the options: [the command line](commands.md).",
    ),
    Area(
        "Ranks, hosts and their start",
        ("launch/", "rankenv.py", "paths.py", "topology.py"),
        "Variables of a launcher that are half set or left over, hosts that cannot be reached or are not alike, a host "
        "or a function that cannot be used. `samestep doctor`, with `--hosts a,b` for several, tries all of it before "
        "a run does: [launching](launching.md), [the doctor](doctor.md).",
    ),
    Area(
        "World, backends and devices",
        ("runtime/",),
        "Ranks that do not find each other, a backend that cannot serve the device, two ranks on one GPU, a world that "
        "is closed. One rank for each GPU, no backend named, and `with samestep.world() as world:` around everything "
        "fix most of them: [other launchers](launching.md#other-launchers), [backends](launching.md#backends).",
    ),
    Area(
        "Fake GPUs",
        ("fake_gpus/",),
        "`--fake-gpus` with a number that is none, on a processor or a build of PyTorch that it does not know; what a "
        "script does that real GPUs could and these cannot: [fake GPUs](fake-gpus.md).",
    ),
    Area(
        "MPI",
        ("runtime/mpi/", "runtime/registration.py"),
        "Ranks that no mpiexec has started, no mpi4py, an MPI that cannot do what torch asks, a rank that is gone: "
        "`samestep run --mpi -n 4 train.py`; [MPI](mpi.md).",
    ),
    Area(
        "Data",
        ("data/",),
        "A dataset that cannot be cut, samples that cannot be loaded, ranks that read unlike data, a loss or a mask "
        "that does not fit the step: [data](data.md), [the step](step.md).",
    ),
    Area(
        "Replicas and gradients",
        ("replicas/", "errors.py"),
        "A model that cannot be replicated, gradients that are not finite, calls in mid-step, replicas that have "
        "parted: [the step](step.md), [BatchNorm](batchnorm.md), [drift](drift.md).",
    ),
    Area(
        "Compressed gradients",
        ("compress/",),
        "A codec's setting that cannot be, or gradients that it cannot code: [compression](compression.md).",
    ),
    Area(
        "Collectives and their plans",
        ("collectives/",),
        "A plan for another number of ranks, a buffer that is not flat, ranks that brought unlike tensors to one sum: "
        "[all-reduce](all-reduce.md), [the process group](process-group.md).",
    ),
    Area(
        "Pipelines",
        ("pipelines/", "schedule/"),
        "A model that cannot be cut (the line that stands in the way is named), devices or stages that do not fit, a "
        "batch that is none: [what can be cut](pipelines.md#what-can-be-cut).",
    ),
    Area(
        "Evaluation",
        ("evaluation.py",),
        "A dataset without a length, or outputs without a row for each sample: [evaluation](runs.md#evaluation).",
    ),
    Area(
        "Checkpoints",
        ("checkpoints/",),
        "A disk that is full, a file that is damaged or hostile, a state that does not fit this model, a directory "
        "that another run holds. Whatever is damaged is quarantined, and the one before it is used; `samestep "
        "checkpoint verify PATH` reads every byte: [checkpoints](checkpoints.md), [from "
        "outside](checkpoints.md#damage).",
    ),
    Area(
        "Clusters, networks and plans of a training",
        ("network/", "planning/", "parsing.py"),
        "A value of a cluster file, of a profile or of a topology that cannot be, with the section it stands in: "
        "[plan before renting](plan.md), [topologies](topologies.md).",
    ),
    Area(
        "Verify",
        ("verification/",),
        "A script that is not there, or a number of ranks that cannot be compared: [verify](verify.md).",
    ),
    Area(
        "Reports",
        ("reporting/",),
        "A run directory that is none, or a file that cannot be written: [reports](reporting.md).",
    ),
    Area(
        "Recipes",
        ("recipes/",),
        "Data that is not where the recipe looks for it, or options that do not fit: [recipes](recipes.md).",
    ),
)


def main() -> int:
    """Returns 0 where the page is what it should be, or is by now."""
    return written(PAGE, page(), "scripts/messages.py")


def page() -> str:
    """Returns the whole page."""
    found: dict[str, dict[str, str]] = {area.title: {} for area in AREAS}
    for path in sorted(SOURCES.rglob("*.py")):
        area = area_of(str(path.relative_to(SOURCES)))
        for kind, message in messages(path):
            found[area.title].setdefault(message, kind)
    return BEGIN + "".join(_part(area, found[area.title]) for area in AREAS)


def area_of(module: str) -> Area:
    """Returns what a module's messages are about."""
    fitting = {where: area for area in AREAS for where in area.where if module.startswith(where)}
    return fitting[max(fitting, key=len)] if fitting else AREAS[0]


def _part(area: Area, found: dict[str, str]) -> str:
    known = sorted(found.items(), key=lambda each: (each[0].lstrip(f"{FILLED} .,:;=(").lower(), each[0]))
    rows = [f"| {_shown(message)} | [{kind}](codes.md#{kind.lower()}) |\n" for message, kind in known]
    told = textwrap.fill(area.told, 119, break_long_words=False, break_on_hyphens=False)
    return f"\n## {area.title}\n\n{told}\n\n| message | error |\n|---|---|\n{''.join(rows)}"


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """Yields class and message of every error that a module makes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for scope in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for call in [node for node in ast.walk(scope) if isinstance(node, ast.Call)]:
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name in CLASSES and call.args:
                place = 1 if name == "RankFailure" and len(call.args) > 1 else 0
                for text in _texts(call.args[place], tree, scope):
                    if len(re.findall(r"[a-z]{2,}", text)) >= KEPT:
                        yield name, " ".join(text.split())


def _texts(node: ast.expr, tree: ast.Module, scope: ast.FunctionDef) -> set[str]:
    """Returns what an expression may read, with `…` for what is not known before a run."""
    if isinstance(node, ast.Constant):
        return {str(node.value)} if isinstance(node.value, str) else {FILLED}
    if isinstance(node, ast.JoinedStr):
        return {re.sub(f"{FILLED}+", FILLED, "".join(_piece(part) for part in node.values))}
    if isinstance(node, ast.IfExp):
        return _texts(node.body, tree, scope) | _texts(node.orelse, tree, scope)
    if isinstance(node, ast.BinOp):
        return {a + b for a in _texts(node.left, tree, scope) for b in _texts(node.right, tree, scope)}
    if isinstance(node, ast.Name):
        given = [each.value for each in ast.walk(scope) if isinstance(each, ast.Assign) and _names(each, node.id)]
        given += [each.value for each in tree.body if isinstance(each, ast.Assign) and _names(each, node.id)]
        return set().union(*(_texts(each, tree, scope) for each in given if not isinstance(each, ast.Name)))
    if isinstance(node, ast.Call):
        return _returned(node, tree)
    return {FILLED}


def _returned(call: ast.Call, tree: ast.Module) -> set[str]:
    """Returns what a function of the same module gives, if the call is of one."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    found: set[str] = set()
    for made in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]:
        for back in [node for node in ast.walk(made) if isinstance(node, ast.Return) and node.value is not None]:
            if not isinstance(back.value, ast.Call):
                found |= _texts(back.value, tree, made)
    return found or {FILLED}


def _names(assignment: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in assignment.targets)


def _piece(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else FILLED


def _shown(message: str) -> str:
    """Returns a message that means nothing to Markdown but itself."""
    for mark in ("\\", "*", "_", "<", ">", "[", "]", "$", "|", "`"):
        message = message.replace(mark, "\\" + mark)
    return message.rstrip()


if __name__ == "__main__":
    sys.exit(main())
