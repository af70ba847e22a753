"""`samestep checkpoint`: what lies in a directory of checkpoints, whether it is what was saved, and other formats."""

from __future__ import annotations

import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.checkpoints.inspection import (
    CheckpointInfo,
    TreeNode,
    audit_data,
    data_positions,
    inspect,
    list_checkpoints,
    objects,
    quarantined,
    size_of,
    tensor_tree,
    virtual_ranks,
)
from samestep.checkpoints.integrity import ForeignError, payloads
from samestep.checkpoints.manifest import Manifest
from samestep.cli.checks import check_outputs, write_json
from samestep.cli.options import Parser, some_seconds, whole
from samestep.errors import CheckpointError, UsageError
from samestep.text import escape_control, format_bytes, plural

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.tree import Tree

OURS, TORCH, DCP = "samestep", "pt", "dcp"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

DESCRIPTION = """Looks at checkpoints from outside; the run that saves them may go on meanwhile.

  list     the checkpoints in PATH: step, time, size, whether they are intact
  show     what is in one of them: objects, tensors, position in the data, versions
  verify   every digest, and the data ledger: was every sample of every epoch used exactly once?
  convert  to and from torch.save files (.pt) and directories of torch.distributed.checkpoint

PATH is the directory that a run saves in, or the folder of one step. `show` and `convert` take the newest step of
a directory, `verify` all."""

EXAMPLES = """examples:
  samestep checkpoint list runs/digits
  samestep checkpoint show runs/digits/step-00000120 --all
  samestep checkpoint verify runs/digits --json verdict.json
  samestep checkpoint convert runs/digits model.pt           for torch.load(weights_only=True)
  samestep checkpoint convert runs/digits exported/          a directory of torch.distributed.checkpoint
  samestep checkpoint convert model.pt runs/new --kind optimizer=torch.optim.adamw.AdamW

exit code: 0; 1 where a checkpoint is damaged or a sample was lost or repeated; 2 for a usage error."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse(arguments)
    if options.action != "convert":
        _refuse(options, "destination", "to", "kind", "step", "epoch", "timeout")
        check_outputs(options, "json")
        return ACTIONS[options.action](options)
    if options.destination is None:
        raise UsageError("convert needs two paths: `samestep checkpoint convert runs/digits model.pt`")
    _refuse(options, "json", "all", "digests")
    return _convert(options)


def _parser() -> Parser:
    usage = "samestep checkpoint list|show|verify PATH [options]\n       samestep checkpoint convert SRC DST [options]"
    parser = Parser("checkpoint", usage=usage, description=DESCRIPTION, epilog=EXAMPLES)
    add = parser.add_argument
    add("action", metavar="ACTION", choices=(*ACTIONS, "convert"), help="list, show, verify or convert")
    add("path", metavar="PATH", type=Path, help="a directory of checkpoints, or one step's folder")
    add("destination", metavar="DST", type=Path, nargs="?", help="where convert writes; must not exist")
    add("--digests", action="store_true", help="list: read every byte, not only names, sizes and headers")
    add("--all", action="store_true", help="show: every tensor, those that are alike too")
    add("--json", metavar="FILE", type=Path, help="write what was found to this file too")
    add("--to", choices=(OURS, TORCH, DCP), help="convert: the format to write, if DST's name does not tell")
    add("--kind", metavar="NAME=CLASS", action="append", help="convert: what a saved optimizer or schedule is")
    add(
        "--step",
        metavar="N",
        type=whole("number of steps", 0),
        help="convert: steps taken before, where the file does not tell (default: 0)",
    )
    add(
        "--epoch",
        metavar="N",
        type=whole("number of epochs", 0),
        help="convert: epochs finished, likewise (default: 0)",
    )
    add("--timeout", metavar="S", type=some_seconds, help="convert: seconds that reading a foreign file may take (600)")
    return parser


def _refuse(options: argparse.Namespace, *names: str) -> None:
    """Refuses options of another action, which would be ignored."""
    for name in names:
        if getattr(options, name):
            shown = "second path" if name == "destination" else f"--{name}"
            raise UsageError(f"{options.action} takes no {shown}; `samestep checkpoint --help` says what belongs where")


# --- list -------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    from rich.table import Table

    folders = list_checkpoints(options.path)
    seen = _inspect_all(folders, digests=options.digests)
    table = Table("checkpoint", "saved", title_justify="left")
    for heading in ("step", "epoch", "ranks", "size"):
        table.add_column(heading, justify="right")
    table.add_column("intact")
    for one in seen:
        table.add_row(one.folder.name, _clock(one.saved), *_numbers(one.manifest), format_bytes(one.size), _intact(one))
    console = _console()
    if seen:
        console.print(table)
    _show_quarantined(console, options.path, folders)
    found = {"path": str(options.path), "checkpoints": [_as_json(one) for one in seen]}
    return write_json(options.json, found, int(any(one.problem is not None for one in seen)))


def _numbers(manifest: Manifest | None) -> tuple[str, str, str]:
    if manifest is None:
        return ("?", "?", "?")
    return (f"{manifest.step:,}", str(manifest.epoch), str(manifest.world_size or "?"))


def _intact(one: CheckpointInfo) -> str:
    return "yes" if one.problem is None else f"no: {escape_control(str(one.problem))}"


def _show_quarantined(console: Console, path: Path, folders: Sequence[Path]) -> None:
    path = path.resolve()
    if path not in folders and (aside := quarantined(path)):
        console.print(
            f"quarantined by earlier runs, damaged or of another run: {', '.join(map(escape_control, aside))}"
        )


# --- show -------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    folders = list_checkpoints(options.path)
    one = inspect(folders[-1], digests=False) if folders else None
    if one is None or one.manifest is None:
        why = "nothing whole is left" if one is None else f"{one.folder}: {escape_control(str(one.problem))}"
        raise CheckpointError(why)
    manifest, console = one.manifest, _console()
    console.print(f"{one.folder}, {format_bytes(one.size)}, saved {_clock(one.saved)}")
    console.print(f"step {manifest.step:,}, {plural(manifest.epoch, 'epoch')} finished, {_ranks(manifest)}")
    _show_given(console, manifest, options.all)
    console.print(f"written by samestep {escape_control(manifest.samestep)}, torch {escape_control(manifest.torch)}")
    if one.problem is not None:
        console.print(f"not intact: {escape_control(str(one.problem))}")
    _show_parts(console, manifest)
    for name, state in data_positions(manifest):
        console.print(f"{escape_control(name)}: {_position(state)}")
    _show_tensors(console, manifest, expand=options.all)
    found = {
        **_as_json(one),
        **{name: getattr(manifest, name) for name in ("samestep", "torch", "command", "settings", "tensors", "parts")},
        "objects": [vars(part) for part in objects(manifest)],
        "virtual_ranks": virtual_ranks(manifest),
        "data": dict(data_positions(manifest)),
        "files": list(payloads(manifest)),
    }
    return write_json(options.json, found, int(one.problem is not None))


def _show_given(console: Console, manifest: Manifest, everything: bool) -> None:
    """Shows the command line, and the settings of the objects; those of a model's layers only with --all."""
    if manifest.command:
        console.print(f"command: {escape_control(shlex.join(manifest.command))}")
    for name, settings in manifest.settings.items():
        if everything or manifest.about.get(name, {}).get("kind") != "module":
            shown = ", ".join(f"{key}={value}" for key, value in settings.items())
            console.print(f"given to {escape_control(name)}: {escape_control(shown)}")


def _ranks(manifest: Manifest) -> str:
    virtual = virtual_ranks(manifest)
    ranks = plural(manifest.world_size, "rank") if manifest.world_size else "ranks unknown"  # of a converted file
    return ranks if virtual is None else f"{ranks}, virtual ranks: {virtual}"


def _show_parts(console: Console, manifest: Manifest) -> None:
    from rich.table import Table

    table = Table("object", "kind")
    for heading in ("tensors", "values", "size", "parameters"):
        table.add_column(heading, justify="right")
    for part in objects(manifest):
        steered = "" if part.parameters is None else f"{part.parameters:,}"
        names = map(escape_control, (part.name, part.kind))
        table.add_row(*names, str(part.tensors), f"{part.values:,}", format_bytes(part.size), steered)
    console.print(table)


def _position(state: dict[str, Any]) -> str:
    order = f"seed {state['seed']}" if state["shuffle"] else "unshuffled"
    return escape_control(f"epoch {state['epoch']}, {state['cursor']} of {state['samples']} samples used, {order}")


def _show_tensors(console: Console, manifest: Manifest, *, expand: bool) -> None:
    from rich.tree import Tree

    tree = Tree(f"{len(manifest.tensors)} tensors{_in_files(manifest)}")
    for branch in tensor_tree(manifest, expand=expand):
        _grow(tree, branch)
    console.print(tree)


def _in_files(manifest: Manifest) -> str:
    """Returns in how many files they lie, where these are several."""
    cut = sum(len(grid["ranks"]) > 1 for grid in manifest.parts.values())
    parts = f", {cut} of them in parts" if cut else ""
    return f"{parts} in {len(payloads(manifest))} files" if len(payloads(manifest)) > 1 else ""


def _grow(tree: Tree, branch: TreeNode) -> None:
    form = f"  {branch.form}" if branch.form else ""
    node = tree.add(escape_control(f"{branch.name}{form}  {format_bytes(branch.size)}"))
    for further in branch.branches:
        _grow(node, further)


# --- verify -----------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    folders = list_checkpoints(options.path)
    seen = _inspect_all(folders, digests=True, audits=True)
    console = _console()
    for one in seen:
        _show_verdict(console, one)
    _show_quarantined(console, options.path, folders)
    wrong = [one for one in seen if not one.is_ok]
    count = plural(len(seen), "checkpoint")
    console.print(f"{count}: all as saved" if seen and not wrong else f"{count}: {len(wrong)} not right")
    ok, rows = bool(seen) and not wrong, [_as_json(one) for one in seen]
    return write_json(options.json, {"path": str(options.path), "ok": ok, "checkpoints": rows}, int(not ok))


def _show_verdict(console: Console, one: CheckpointInfo) -> None:
    if one.problem is not None:
        kind = "" if isinstance(one.problem, ForeignError) else "damaged: "
        console.print(f"{one.folder.name}: {kind}{escape_control(str(one.problem))}")
        return
    console.print(f"{one.folder.name}: every byte as saved, {format_bytes(one.size)}")
    for name, audit in one.audits.items():
        console.print(f"  {escape_control(name)}: {escape_control(audit.summary)}")
        for problem in audit.problems:
            console.print(f"    {escape_control(problem)}")


# --- convert ----------------------------------------------------------------------------------------


def _convert(options: argparse.Namespace) -> int:
    source, destination = options.path, options.destination
    if not source.exists() and destination.exists():
        raise UsageError(f"{source} is not there, and {destination} is: give what is converted first, then a new name")
    for folder in destination.parents:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{destination} cannot be written: {folder} is a file, not a directory; give another name")
    given = _format_of(source)
    wanted = options.to or (TORCH if destination.suffix in SUFFIXES else DCP if given == OURS else OURS)
    if destination.exists() or destination.is_symlink():
        raise UsageError(f"{destination} exists; nothing is written over, give another name")
    if given == wanted:
        others = " or ".join(f"--to {form}" for form in (OURS, TORCH, DCP) if form != given)
        raise UsageError(f"{source} has the format {given} already: give {others}")
    if given == OURS:
        for name in ("kind", "step", "epoch"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for files that do not tell; {source} does")
        _export(_newest(source), destination, wanted)
    elif wanted == OURS:
        _import(options, source, destination)
    else:
        _through_ours(options, source, destination, wanted)
    print(f"{source} ({given}) is now {destination} ({wanted}) too")
    return 0


def _format_of(path: Path) -> str:
    if path.is_file():
        return TORCH
    if not path.exists():
        raise UsageError(f"{path} is not there")
    if (path / ".metadata").exists():
        return DCP
    list_checkpoints(path)
    return OURS


def _newest(path: Path) -> Path:
    folders = list_checkpoints(path)
    if not folders:
        raise UsageError(f"all checkpoints in {path} are quarantined because they are damaged")
    return folders[-1]


def _export(folder: Path, destination: Path, wanted: str) -> None:
    from samestep.checkpoints.convert import to_dcp, to_torch

    (to_torch if wanted == TORCH else to_dcp)(folder, destination)


def _import(options: argparse.Namespace, source: Path, destination: Path) -> None:
    from samestep.checkpoints.convert import from_foreign

    step, epoch = options.step or 0, options.epoch or 0
    timeout = 600.0 if options.timeout is None else options.timeout
    kinds = _kinds(options.kind or [])
    left_out = from_foreign(source, destination, timeout=timeout, step=step, epoch=epoch, kinds=kinds)
    if left_out:
        print(f"left out, because no states: {ascii(left_out)[1:-1]}; see --step and --epoch")


def _through_ours(options: argparse.Namespace, source: Path, destination: Path, wanted: str) -> None:
    between = destination.absolute().parent / f".{destination.name}.between-{secrets.token_hex(4)}"
    try:
        _import(options, source, between)
        _export(_newest(between), destination, wanted)
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _kinds(given: list[str]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in given]
    for name, equals, kind in pairs:
        if not (name and equals and kind):
            raise UsageError(f"--kind {name}{equals}{kind}: give NAME=CLASS, as in optimizer=torch.optim.AdamW")
    return {name: kind for name, _, kind in pairs}


# --- what they share ----------------------------------------------------------------------------------


def _inspect_all(folders: Sequence[Path], *, digests: bool, audits: bool = False) -> list[CheckpointInfo]:
    seen = []
    total = sum(map(size_of, folders)) if digests else 0
    with _progress(total) as advance:
        for folder in folders:
            one = inspect(folder, digests=digests, progress=advance)
            if one is not None and audits and one.manifest is not None and one.problem is None:
                one = replace(one, audits=audit_data(one.manifest))
            seen += [] if one is None else [one]
    return seen


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    from rich.console import Console

    console = Console(stderr=True)
    if not total or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def _console() -> Console:
    from rich.console import Console

    # A name in a file may look like markup, and a file that is written to has no width.
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    return console


def _as_json(one: CheckpointInfo) -> dict[str, Any]:
    manifest, problem = one.manifest, one.problem
    return {
        "name": one.folder.name,
        "step": None if manifest is None else manifest.step,
        "epoch": None if manifest is None else manifest.epoch,
        "world_size": None if manifest is None else manifest.world_size or None,
        "bytes": one.size,
        "saved": one.saved,
        "intact": problem is None,
        "problem": None if problem is None else str(problem),
        "file": None if problem is None else problem.file,
        "tensors": [] if problem is None else list(problem.tensors),
        "ledgers": {name: vars(audit) for name, audit in one.audits.items()},
    }


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {"list": _list, "show": _show, "verify": _verify}
