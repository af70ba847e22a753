from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.recipes import corpus
from samestep.recipes.corpus import IGNORED, START, ByteSequences


@pytest.fixture
def library(tmp_path):
    """A folder of Python files, with what does not belong to it."""
    for number in range(20):
        (tmp_path / f"module{number}.py").write_bytes(b"x = %d\n" % number)
    for stranger in ("test/test_x.py", "site-packages/other.py", "pkg/tests/test_y.py"):
        (tmp_path / stranger).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / stranger).write_bytes(b"stranger\n")
    (tmp_path / "pkg" / "inner.py").write_bytes(b"inner\n")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"no Python\n")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / ".#module0.py").symlink_to("somebody@host.1:2")  # as editors mark what they have open
    return tmp_path


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6).filter(any), st.integers(1, 12))
def test_every_byte_is_a_target_exactly_once_in_order(files, context):
    sequences = ByteSequences(files, context)
    targets = torch.cat([sequences[index][1] for index in range(len(sequences))])
    assert bytes(targets[targets != IGNORED].tolist()) == b"".join(files)


@given(st.binary(min_size=1, max_size=40), st.integers(1, 12))
def test_each_input_is_the_byte_before_its_target(text, context):
    sequences = ByteSequences([text], context)
    pairs = [sequences[index] for index in range(len(sequences))]
    inputs, targets = (torch.cat(part) for part in zip(*pairs, strict=True))
    real = targets != IGNORED
    assert inputs[real].tolist() == [START, *text[:-1]]


def test_a_sequence_never_crosses_into_another_file():
    sequences = ByteSequences([b"abcde", b"fg"], 4)
    assert [sequences[index][0].tolist() for index in range(3)] == [
        [START, *b"abc"],
        [*b"d", START, START, START],
        [START, *b"f", START, START],
    ]
    assert [sequences[index][1].tolist() for index in range(3)] == [
        [*b"abcd"],
        [*b"e", IGNORED, IGNORED, IGNORED],
        [*b"fg", IGNORED, IGNORED],
    ]


def test_the_weight_of_a_batch_is_its_unmasked_bytes():
    sequences = ByteSequences([b"abcde", b"fg"], 4)
    batch = torch.utils.data.default_collate([sequences[index] for index in range(3)])
    assert corpus.unmasked(batch) == 7


def test_tests_installed_packages_and_empty_files_are_left_out(library):
    files = corpus.read_files(library, 10_000)
    assert len(files) == 21
    assert b"stranger\n" not in files
    assert b"inner\n" in files


def test_a_tenth_of_the_files_is_held_out_and_no_file_is_in_both(library):
    train, held_out = corpus.train_and_held_out(library, total=10_000, context=8)
    held = bytes(held_out.text.tolist())
    assert held.count(b"\n") == 3
    assert all(line not in bytes(train.text.tolist()) for line in held.splitlines(keepends=True))


def test_no_more_than_the_bytes_asked_for_are_read(library):
    train, held_out = corpus.train_and_held_out(library, total=50, context=8)
    assert train.bytes + held_out.bytes == 50


def test_files_behind_the_last_byte_asked_for_are_not_opened(library, monkeypatch):
    opened = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or read(path))
    files = corpus.read_files(library, 15)
    assert sum(map(len, files)) == 15
    assert len([path for path in opened if path.name != "empty.py"]) == len(files)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(samestep.UsageError, match="no data folder at .*nowhere"):
        corpus.train_and_held_out(tmp_path / "nowhere", total=100, context=8)


def test_a_folder_without_python_files_is_named(tmp_path):
    with pytest.raises(samestep.UsageError, match="gives 0 Python files within 100 bytes"):
        corpus.train_and_held_out(tmp_path, total=100, context=8)


def test_the_standard_library_of_this_python_is_found():
    assert (corpus.standard_library() / "argparse.py").is_file()
