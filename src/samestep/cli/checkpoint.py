"""`samestep checkpoint`: what lies in a directory of checkpoints, whether it is what was saved, and other formats."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli.before import check_json
from samestep.cli.options import Parser, some_seconds, whole
from samestep.cli.result import write_json
from samestep.errors import CheckpointError, UsageError
from samestep.text import escape_control, format_bytes, plural

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.tree import Tree

    from samestep.running.checkpoints.contents import CheckpointInfo
    from samestep.running.checkpoints.manifest import Manifest
    from samestep.running.checkpoints.outline import TreeNode

__all__ = ["main"]

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
        if options.json is not None:
            check_json(options.json)
        return ACTIONS[options.action](options)
    if options.destination is None:
        raise UsageError("convert needs two paths: `samestep checkpoint convert runs/digits model.pt`")
    _refuse(options, "json", "all", "digests")
    from samestep.cli.convert import convert

    return convert(options)


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
    add("--to", choices=("samestep", "pt", "dcp"), help="convert: the format to write, if DST's name does not tell")
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
    """Options of another action would be ignored without a word."""
    for name in names:
        if getattr(options, name):
            shown = "second path" if name == "destination" else f"--{name}"
            raise UsageError(f"{options.action} takes no {shown}; `samestep checkpoint --help` says what belongs where")


# --- list -------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    from rich.table import Table

    from samestep.running.checkpoints.contents import list_checkpoints

    folders = list_checkpoints(options.path)
    seen = _looked_at(folders, digests=options.digests)
    table = Table("checkpoint", "saved", title_justify="left")
    for heading in ("step", "epoch", "ranks", "size"):
        table.add_column(heading, justify="right")
    table.add_column("intact")
    for one in seen:
        table.add_row(one.folder.name, _clock(one.saved), *_numbers(one.manifest), format_bytes(one.size), _intact(one))
    console = _console()
    if seen:
        console.print(table)
    _tell_aside(console, options.path, folders)
    told = {"path": str(options.path), "checkpoints": [_as_json(one) for one in seen]}
    return write_json(options.json, told, int(any(one.problem is not None for one in seen)))


def _numbers(manifest: Manifest | None) -> tuple[str, str, str]:
    if manifest is None:
        return ("?", "?", "?")
    return (f"{manifest.step:,}", str(manifest.epoch), str(manifest.world_size or "?"))


def _intact(one: CheckpointInfo) -> str:
    return "yes" if one.problem is None else f"no: {escape_control(str(one.problem))}"


def _tell_aside(console: Console, path: Path, folders: Sequence[Path]) -> None:
    from samestep.running.checkpoints.contents import quarantined

    path = path.resolve()
    if path not in folders and (aside := quarantined(path)):
        console.print(
            f"quarantined by earlier runs, damaged or of another run: {', '.join(map(escape_control, aside))}"
        )


# --- show -------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    from samestep.running.checkpoints.contents import data_positions, inspect, list_checkpoints, objects

    folders = list_checkpoints(options.path)
    one = inspect(folders[-1], digests=False) if folders else None
    if one is None or one.manifest is None:
        why = "nothing whole is left" if one is None else f"{one.folder}: {escape_control(str(one.problem))}"
        raise CheckpointError(why)
    manifest, console = one.manifest, _console()
    console.print(f"{one.folder}, {format_bytes(one.size)}, saved {_clock(one.saved)}")
    console.print(f"step {manifest.step:,}, {plural(manifest.epoch, 'epoch')} finished, {_ranks(manifest)}")
    console.print(f"written by samestep {escape_control(manifest.samestep)}, torch {escape_control(manifest.torch)}")
    if one.problem is not None:
        console.print(f"not intact: {escape_control(str(one.problem))}")
    _show_parts(console, manifest)
    for name, state in data_positions(manifest):
        console.print(f"{escape_control(name)}: {_position(state)}")
    _show_tensors(console, manifest, whole=options.all)
    told = {**_as_json(one), "objects": [vars(part) for part in objects(manifest)], **_rest(manifest)}
    return write_json(options.json, told, int(one.problem is not None))


def _ranks(manifest: Manifest) -> str:
    from samestep.running.checkpoints.contents import virtual_ranks

    virtual = virtual_ranks(manifest)
    told = (
        plural(manifest.world_size, "rank") if manifest.world_size else "ranks unknown"
    )  # a converted file tells none
    return told if virtual is None else f"{told}, virtual ranks: {virtual}"


def _show_parts(console: Console, manifest: Manifest) -> None:
    from rich.table import Table

    from samestep.running.checkpoints.contents import objects

    table = Table("object", "kind")
    for heading in ("tensors", "values", "size", "parameters"):
        table.add_column(heading, justify="right")
    for part in objects(manifest):
        steered = "" if part.parameters is None else f"{part.parameters:,}"
        row = (
            escape_control(part.name),
            escape_control(part.kind),
            str(part.tensors),
            f"{part.values:,}",
            format_bytes(part.size),
        )
        table.add_row(*row, steered)
    console.print(table)


def _position(state: dict[str, Any]) -> str:
    order = f"seed {state['seed']}" if state["shuffle"] else "unshuffled"
    return escape_control(f"epoch {state['epoch']}, {state['cursor']} of {state['samples']} samples used, {order}")


def _show_tensors(console: Console, manifest: Manifest, *, whole: bool) -> None:
    from rich.tree import Tree

    from samestep.running.checkpoints.outline import tensor_tree

    tree = Tree(f"{len(manifest.tensors)} tensors{_in_files(manifest)}")
    for branch in tensor_tree(manifest, whole=whole):
        _grow(tree, branch)
    console.print(tree)


def _in_files(manifest: Manifest) -> str:
    """In how many files they lie, where these are several."""
    cut = sum(len(grid["ranks"]) > 1 for grid in manifest.parts.values())
    parts = f", {cut} of them in parts" if cut else ""
    return f"{parts} in {len(manifest.files)} files" if len(manifest.files) > 1 else ""


def _grow(tree: Tree, branch: TreeNode) -> None:
    form = f"  {branch.form}" if branch.form else ""
    node = tree.add(escape_control(f"{branch.name}{form}  {format_bytes(branch.size)}"))
    for further in branch.branches:
        _grow(node, further)


def _rest(manifest: Manifest) -> dict[str, Any]:
    from samestep.running.checkpoints.contents import data_positions, virtual_ranks

    return {
        "virtual_ranks": virtual_ranks(manifest),
        "samestep": manifest.samestep,
        "torch": manifest.torch,
        "data": dict(data_positions(manifest)),
        "tensors": manifest.tensors,
        "files": list(manifest.files),
        "parts": manifest.parts,
    }


# --- verify -----------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    from samestep.running.checkpoints.contents import list_checkpoints

    folders = list_checkpoints(options.path)
    seen = _looked_at(folders, digests=True, with_ledgers=True)
    console = _console()
    for one in seen:
        _tell(console, one)
    _tell_aside(console, options.path, folders)
    wrong = [one for one in seen if not one.is_right]
    count = plural(len(seen), "checkpoint")
    console.print(f"{count}: all as saved" if seen and not wrong else f"{count}: {len(wrong)} not right")
    ok, rows = bool(seen) and not wrong, [_as_json(one) for one in seen]
    return write_json(options.json, {"path": str(options.path), "ok": ok, "checkpoints": rows}, int(not ok))


def _tell(console: Console, one: CheckpointInfo) -> None:
    from samestep.running.checkpoints.integrity import ForeignError

    if one.problem is not None:
        kind = "" if isinstance(one.problem, ForeignError) else "damaged: "
        console.print(f"{one.folder.name}: {kind}{escape_control(str(one.problem))}")
        return
    console.print(f"{one.folder.name}: every byte as saved, {format_bytes(one.size)}")
    for name, ledger in one.ledgers.items():
        console.print(f"  {escape_control(name)}: {escape_control(ledger.summary)}")
        for problem in ledger.problems:
            console.print(f"    {escape_control(problem)}")


# --- what they share ----------------------------------------------------------------------------------


def _looked_at(folders: Sequence[Path], *, digests: bool, with_ledgers: bool = False) -> list[CheckpointInfo]:
    from dataclasses import replace

    from samestep.running.checkpoints.contents import audit_data, inspect, size_of

    seen = []
    total = sum(map(size_of, folders)) if digests else 0
    with _progress(total) as advance:
        for folder in folders:
            one = inspect(folder, digests=digests, progress=advance)
            if one is not None and with_ledgers and one.manifest is not None and one.problem is None:
                one = replace(one, ledgers=audit_data(one.manifest))
            seen += [] if one is None else [one]
    return seen


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on standard error, where somebody looks at it."""
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
        "ledgers": {name: vars(ledger) for name, ledger in one.ledgers.items()},
    }


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {"list": _list, "show": _show, "verify": _verify}
