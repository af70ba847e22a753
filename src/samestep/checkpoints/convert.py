"""Checkpoints in other formats: a file of `torch.save`, a directory of torch.distributed.checkpoint, and back.

    ours  ──►  .pt       {"model": {…}, "optimizer": {…}, …, "samestep": {…}}       plain tensors and plain data
    ours  ──►  dcp       the same, saved by one process
    .pt, dcp  ──►  ours  in a process of its own, see samestep.checkpoints.convert_worker

The entry "samestep" carries what those formats have no place for (step, epoch, kinds, random streams, empty parts), so
there and back every bit is the same. Whoever only wants the model need not look at it. Nothing is overwritten: what is
written gets its name when it is whole.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoints.directory import complete, os_error_text, sync_folder
from samestep.checkpoints.integrity import verify
from samestep.checkpoints.manifest import decode, to_text
from samestep.checkpoints.reader import read_tensors
from samestep.errors import CheckpointError
from samestep.rankenv import child_environment

SAMESTEP_KEY = "samestep"  # the entry that carries what other formats have no place for


def to_torch(folder: Path, destination: Path) -> None:
    """Writes the checkpoint in `folder` as a file that `torch.load(weights_only=True)` reads."""
    content = _content(folder)
    _write_atomically(destination, lambda path: torch.save(content, path))


def to_dcp(folder: Path, destination: Path) -> None:
    """Writes the checkpoint in `folder` as a directory of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    content = _content(folder)

    def save(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch.distributed is not initialised is what no_dist says
            save_state(content, checkpoint_id=path, no_dist=True)

    _write_atomically(destination, save)


def from_foreign(source: Path, destination: Path, *, timeout: float, **request: Any) -> list[str]:
    """Writes what `source` holds as the directory of a run with one checkpoint; returns what was left out.

    `source` is a file of `torch.save` or a directory of torch.distributed.checkpoint; `timeout` are the seconds that
    reading it may take, and `request` has the step, epoch and kinds that it does not tell.
    """
    left_out: list[str] = []

    def save(path: Path) -> None:
        answer = _run_worker(
            {"source": str(source.absolute()), "into": str(path), "timeout": timeout, **request}, timeout
        )
        if "error" in answer:
            raise CheckpointError(f"cannot convert {source}: {answer['error']}")
        left_out.extend(map(str, answer["left_out"]))
        for entry in path.glob(".lock*"):
            entry.unlink()
        verify(path / complete(path)[-1])  # the other process has read a stranger's file

    _write_atomically(destination, save)
    return left_out


def _content(folder: Path) -> dict[str, Any]:
    manifest = verify(folder)
    if SAMESTEP_KEY in manifest.state:
        raise CheckpointError(
            f"{folder} holds an object named {SAMESTEP_KEY!r}, the name of what is added on converting"
        )
    tensors = read_tensors(folder, manifest)
    states = {name: _plain(decode(tree, tensors)) for name, tree in manifest.state.items()}
    text = to_text(replace(manifest, tensors={}, parts={}))
    return {**states, SAMESTEP_KEY: {"manifest": text, "extra": _plain(decode(manifest.extra, tensors))}}


def _plain(value: Any) -> Any:
    """Arrays as tensors: `weights_only` reads no arrays."""
    if isinstance(value, Mapping):
        return type(value)({key: _plain(one) for key, one in value.items()})  # type: ignore[call-arg]
    if type(value) in {list, tuple}:
        return type(value)(_plain(one) for one in value)
    if isinstance(value, Tensor) or value is None or isinstance(value, str | bytes | int | float):
        return value
    return torch.from_numpy(value)


def _write_atomically(destination: Path, save: Callable[[Path], None]) -> None:
    """Lets `save` write beside `destination`, which gets its name by a rename, whole or not at all."""
    parent = destination.absolute().parent
    unfinished = parent / f".{destination.name}.tmp-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        save(unfinished)
        _sync(unfinished)
        if destination.exists() or destination.is_symlink():
            raise CheckpointError(f"{destination} exists by now; nothing was written over it")
        unfinished.rename(destination.absolute())
        sync_folder(parent)
    except (OSError, RuntimeError) as error:
        why = os_error_text(error) if isinstance(error, OSError) else " ".join(str(error).split())[:200]
        raise CheckpointError(f"cannot write {destination}: {why}") from error
    finally:
        if unfinished.is_file():
            unfinished.unlink()
        else:
            shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    for entry in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        with entry.open("rb") as file:
            os.fsync(file.fileno())


def _run_worker(request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-m", "samestep.checkpoints.convert_worker"],
            input=json.dumps(request) + "\n",
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            env=child_environment({"OMP_NUM_THREADS": "1"}),
        )
    except subprocess.TimeoutExpired:
        return {"error": f"reading took more than {timeout:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {"error": f"the process that read it ended with {done.returncode}: {done.stderr.strip()[-200:]}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
