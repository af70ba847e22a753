"""`samestep checkpoint convert`: which format lies at SRC, which is wanted at DST, and who turns one into the other."""

from __future__ import annotations

import argparse
import secrets
import shutil
from pathlib import Path

from samestep.errors import UsageError

__all__: list[str] = []

OURS, TORCH, DCP = "samestep", "pt", "dcp"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def convert(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    source, destination = options.path, options.destination
    if not source.exists() and destination.exists():
        raise UsageError(f"{source} is not there, and {destination} is: give what is converted first, then a new name")
    if (file := _file_in_the_way(destination)) is not None:
        raise UsageError(f"{destination} cannot be written: {file} is a file, not a directory; give another name")
    given = format_of(source)
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


def _file_in_the_way(destination: Path) -> Path | None:
    return next((folder for folder in destination.parents if folder.exists() and not folder.is_dir()), None)


def format_of(path: Path) -> str:
    """Returns the format of what lies at `path`.

    Raises:
        UsageError: there is nothing, or nothing that is known.
    """
    if path.is_file():
        return TORCH
    if not path.exists():
        raise UsageError(f"{path} is not there")
    if (path / ".metadata").exists():
        return DCP
    from samestep.running.checkpoints.contents import list_checkpoints

    list_checkpoints(path)
    return OURS


def _newest(path: Path) -> Path:
    from samestep.running.checkpoints.contents import list_checkpoints

    folders = list_checkpoints(path)
    if not folders:
        raise UsageError(f"all checkpoints in {path} are quarantined because they are damaged")
    return folders[-1]


def _export(folder: Path, destination: Path, wanted: str) -> None:
    from samestep.running.checkpoints.convert import to_dcp, to_torch

    (to_torch if wanted == TORCH else to_dcp)(folder, destination)


def _import(options: argparse.Namespace, source: Path, destination: Path) -> None:
    from samestep.running.checkpoints.convert import from_foreign

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
