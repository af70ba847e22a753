r"""Text that is on every machine: the Python files of the standard library, as sequences of bytes.

Language models are usually trained on one long stream cut into equal pieces, so that no piece is ever short.
Here each file is cut by itself, and its last piece is padded and masked: ranks then hold different numbers of
real tokens, which is where a mean of means goes wrong.

    file "import os\n", context 4     inputs   ^imp  ort   os..      ^ is START
                                      targets  impo  rt o  s\n..      . is padding, masked

Every byte of every file is a target exactly once, so bits per byte over the held-out files are exact.
Which files are held out depends on their names alone. Another Python version has other files: train on machines
with the same one.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch.utils.data import Dataset

import samestep

__all__ = ["IGNORED", "START", "SYMBOLS", "ByteSequences", "standard_library", "train_and_held_out", "unmasked"]

START = 256  # stands before the first byte of a file
SYMBOLS = 257
IGNORED = -100  # a target that is padding; cross_entropy leaves it out
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}  # not the library itself
HELD_OUT_EVERY = 10

Sample: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class ByteSequences(Dataset[Sample]):
    """Samples `(inputs, targets)`, each int64 of `context` symbols; target j is what follows input j."""

    def __init__(self, files: Sequence[bytes], context: int) -> None:
        self.context = context
        self.text = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8).long()
        self.spans = spans(map(len, files), context)
        self.bytes = len(self.text)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Sample:
        begin, end, is_first = self.spans[index]
        inputs = torch.full((self.context,), START)
        targets = torch.full((self.context,), IGNORED)
        targets[: end - begin] = self.text[begin:end]
        if is_first:
            inputs[1 : end - begin] = self.text[begin : end - 1]
        else:
            inputs[: end - begin] = self.text[begin - 1 : end - 1]
        return inputs, targets


def spans(lengths: Sequence[int] | map[int], context: int) -> list[tuple[int, int, bool]]:
    """Pieces `(begin, end, is the first of its file)` of files laid end to end.

    >>> spans([5, 2], 4)
    [(0, 4, True), (4, 5, False), (5, 7, True)]
    """
    found, start = [], 0
    for length in lengths:
        pieces = range(start, start + length, context)
        found += [(begin, min(begin + context, start + length), begin == start) for begin in pieces]
        start += length
    return found


def unmasked(batch: Sample) -> int:
    """How many targets of a batch count: its weight among the batches of a step."""
    return int((batch[1] != IGNORED).sum())


def train_and_held_out(folder: Path, *, total: int, context: int) -> tuple[ByteSequences, ByteSequences]:
    """Up to `total` bytes of the folder's *.py files; every tenth file is held out.

    Raises:
        samestep.UsageError: there is no such folder, or fewer than two files in it.
    """
    files = read_files(folder, total)
    held_out = files[::HELD_OUT_EVERY]
    train = [text for index, text in enumerate(files) if index % HELD_OUT_EVERY]
    if not train:
        raise samestep.UsageError(
            f"{folder} gives {len(files)} Python files within {total} bytes: at least 2 are needed, "
            "one to train on and one to hold out"
        )
    return ByteSequences(train, context), ByteSequences(held_out, context)


def read_files(folder: Path, total: int) -> list[bytes]:
    """Files in the order of their names' hashes, which mixes packages, until `total` bytes are there."""
    if not folder.is_dir():
        raise samestep.UsageError(f"no data folder at {folder}: give one that holds *.py files")
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*.py")) if path.is_file())
    names = [path.as_posix() for path in paths if not SKIPPED.intersection(path.parts)]
    files: list[bytes] = []
    for name in sorted(names, key=lambda name: hashlib.blake2b(name.encode()).digest()):
        if total == 0:
            break
        text = (folder / name).read_bytes()[:total]
        total -= len(text)
        files += [text] if text else []
    return files


def standard_library() -> Path:
    """Where this Python keeps its own modules."""
    return Path(sysconfig.get_paths()["stdlib"])
