"""A checkpoint is there whole or not there; what cannot be written says why and leaves the older ones alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from samestep.checkpoints import writer
from samestep.checkpoints.directory import CheckpointDirectory
from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.integrity import read_manifest, verify
from samestep.checkpoints.manifest import SCHEMA, Manifest
from samestep.checkpoints.reader import read_tensors
from samestep.errors import CheckpointError
from samestep.testing import assert_same_bits

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def directory(tmp_path):
    opened = CheckpointDirectory(tmp_path)
    yield opened
    opened.close()


def save(directory, step, value):
    encoder = Encoder()
    state = {"model": encoder.encode(value, "model")}
    manifest = Manifest(SCHEMA, step, 0, 1, "1", "2", {}, state, None)
    return writer.write(directory, manifest, encoder.tensors)


def load(folder):
    manifest = verify(folder)
    return read_tensors(folder, manifest)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_and_layout_comes_back_bit_for_bit(directory, dtype):
    values = (torch.randn(4, 6, dtype=torch.complex128) * 50).to(torch.complex128)
    square = (values if dtype.is_complex else values.real).to(dtype)
    tensors = {
        "whole": square,
        "turned": square.T,
        "strided": square[::2, 1::2],
        "broadcast": square[:1].expand(5, 6),
        "scalar": square[0, 0],
        "nothing": square[:0],
    }
    folder = save(directory, 1, tensors)
    assert_same_bits(load(folder), {f"model/{name}": tensor for name, tensor in tensors.items()})


def test_conjugate_and_negated_views_are_saved_as_they_read(directory):
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    folder = save(directory, 1, {"conj": numbers.conj(), "imag": numbers.conj().imag})
    loaded = load(folder)
    assert loaded["model/conj"].tolist() == [1 - 2j, 3 + 4j]
    assert loaded["model/imag"].tolist() == [-2.0, 4.0]


def test_the_folder_holds_a_payload_that_others_can_read_and_a_manifest_that_describes_it(directory):
    folder = save(directory, 7, {"weight": torch.ones(2, 3)})
    payload = folder / "tensors.safetensors"
    assert folder.name == "step-00000007"
    assert sorted(entry.name for entry in folder.iterdir()) == ["manifest.json", "tensors.safetensors"]
    assert_same_bits(load_file(payload), {"model/weight": torch.ones(2, 3)})
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(torch.ones(2, 3).numpy().tobytes()).hexdigest()
    assert manifest["tensors"] == {"model/weight": {"dtype": "float32", "shape": [2, 3], "sha256": [digest]}}


def test_the_payload_is_byte_for_byte_what_the_library_writes(directory):
    tensors = {str(dtype): torch.ones(3, dtype=dtype) for dtype in TYPES if dtype != torch.complex128}
    folder = save(directory, 1, tensors)
    save_file({f"model/{name}": tensor for name, tensor in tensors.items()}, directory.path / "theirs")
    assert_same_bits(load_file(folder / "tensors.safetensors"), load_file(directory.path / "theirs"))
    assert (folder / "tensors.safetensors").stat().st_size == (directory.path / "theirs").stat().st_size


def test_a_state_without_tensors_is_a_checkpoint_too(directory):
    assert load(save(directory, 1, {"count": 3})) == {}


def test_what_is_read_does_not_depend_on_the_file_any_more(directory):
    folder = save(directory, 1, {"weight": torch.arange(1000.0)})
    loaded = read_tensors(folder, read_manifest(folder))
    (folder / "tensors.safetensors").write_bytes(b"")
    assert_same_bits(loaded["model/weight"], torch.arange(1000.0))


def test_a_save_that_fails_half_way_leaves_nothing_behind(directory, monkeypatch):
    save(directory, 1, {"weight": torch.ones(3)})
    before = sorted(entry.name for entry in directory.path.iterdir())

    def refuse(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match=r"cannot save .*step-00000002: Input/output error"):
        save(directory, 2, {"weight": torch.ones(3)})
    assert sorted(entry.name for entry in directory.path.iterdir()) == before


def test_a_full_disk_says_what_was_needed_and_what_is_free(small_disk):
    directory = CheckpointDirectory(small_disk)
    try:
        old = save(directory, 1, {"weight": torch.ones(500_000)})
        with pytest.raises(CheckpointError, match=r"step-00000002: disk full at .*disk: needs 8 MB, free 2\.\d+ MB"):
            save(directory, 2, {"weight": torch.ones(2_000_000)})
        assert directory.names() == [old.name]
        verify(old)
    finally:
        directory.close()


def test_a_disk_that_fills_up_while_writing_is_told_the_same_way(small_disk, monkeypatch):
    directory = CheckpointDirectory(small_disk)
    monkeypatch.setattr(writer, "_require_space", lambda path, needed: None)  # the space went after it was looked at
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002: disk full at .*disk: needs 8 MB, free \d\.\d+ MB"):
            save(directory, 2, {"weight": torch.ones(2_000_000)})
        assert [entry.name for entry in small_disk.iterdir() if "step" in entry.name] == []
        verify(save(directory, 3, {"weight": torch.ones(10)}))
    finally:
        directory.close()


def test_a_read_only_file_system_is_named(small_disk):
    directory = CheckpointDirectory(small_disk)
    old = save(directory, 1, {"weight": torch.ones(10)})
    directory.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=f"cannot keep checkpoints in {small_disk}: the file system is read-only"):
        CheckpointDirectory(small_disk)
    verify(old)


def test_nothing_is_written_outside_the_umask(directory):
    old = os.umask(0o077)
    try:
        folder = save(directory, 1, {"weight": torch.ones(3)})
    finally:
        os.umask(old)
    assert {oct(entry.stat().st_mode & 0o077) for entry in [folder, *folder.iterdir()]} == {"0o0"}
