"""A checkpoint is there whole or not there; what cannot be written says why and leaves the older ones alone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from samestep.errors import CheckpointError
from samestep.running.checkpoints import writer
from samestep.running.checkpoints.directory import Directory
from samestep.running.checkpoints.format import SCHEMA, Encoder, Manifest
from samestep.running.checkpoints.reader import newest_good, read_manifest, read_tensors, verify
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
    opened = Directory(tmp_path)
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
    assert manifest["tensors"] == {"model/weight": {"dtype": "float32", "shape": [2, 3]}}
    assert manifest["files"] == {
        "tensors.safetensors": {
            "size": payload.stat().st_size,
            "sha256": hashlib.sha256(payload.read_bytes()).hexdigest(),
        }
    }


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

    monkeypatch.setattr(writer.os, "fsync", refuse)
    with pytest.raises(CheckpointError, match=r"cannot save .*step-00000002: Input/output error"):
        save(directory, 2, {"weight": torch.ones(3)})
    assert sorted(entry.name for entry in directory.path.iterdir()) == before


KILLED = """
    import os, shutil, signal, sys
    from pathlib import Path
    import torch
    from safetensors.torch import save_file
    from samestep.running.checkpoints import directory as directories, writer
    from samestep.running.checkpoints.directory import Directory
    from samestep.running.checkpoints.format import SCHEMA, Encoder, Manifest

    torch.set_num_threads(1)
    calls, deadline = 0, 0

    def counted(function):
        def call(*args, **options):
            global calls
            for _ in range(2):  # once before the call, once after it
                calls += 1
                if calls == deadline:
                    os.kill(os.getpid(), signal.SIGKILL)
                if _ == 0:
                    result = function(*args, **options)
            return result
        return call

    def save(directory, step):
        encoder = Encoder()
        state = {"model": encoder.encode({"weight": torch.full((2000,), float(step)), "step": step}, "model")}
        writer.write(directory, Manifest(SCHEMA, step, 0, 1, "1", "2", {}, state, None), encoder.tensors)
        directory.prune(directories.Keep(1))

    def child(path):
        directory = Directory(path)
        save(directory, 1)
        os.fsync, Path.rename, Path.mkdir = counted(os.fsync), counted(Path.rename), counted(Path.mkdir)
        writer.save_file, directories.shutil.rmtree = counted(save_file), counted(shutil.rmtree)
        save(directory, 2)
        os._exit(0)

    while True:
        deadline += 1
        path = Path(sys.argv[1]) / str(deadline)
        if (pid := os.fork()) == 0:
            child(path)
        status = os.waitpid(pid, 0)[1]
        print(deadline, os.waitstatus_to_exitcode(status), flush=True)
        if status == 0:
            break
"""


def test_killed_at_any_point_of_a_save_the_old_or_the_new_checkpoint_is_whole(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(KILLED))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    runs = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    found = []
    for number, status in runs:
        directory = Directory(tmp_path / str(number))
        folder = directory.path / newest_good(directory)
        directory.close()
        manifest = verify(folder)
        weight = read_tensors(folder, manifest)["model/weight"]
        assert weight.unique().tolist() == [manifest.step] == [manifest.state["model"]["dict"]["step"]]
        assert not [entry for entry in directory.path.iterdir() if ".tmp-" in entry.name or ".bad" in entry.name]
        found.append((status, manifest.step))
    assert len(runs) > 15
    assert runs[-1][1] == 0
    assert all(status == -signal.SIGKILL for status, _ in found[:-1])
    steps = [step for _, step in found]
    assert steps == sorted(steps)  # the old one up to the rename, the new one from there on
    assert set(steps) == {1, 2}


def test_a_full_disk_says_what_was_needed_and_what_is_free(small_disk):
    directory = Directory(small_disk)
    try:
        old = save(directory, 1, {"weight": torch.ones(500_000)})
        with pytest.raises(CheckpointError, match=r"step-00000002: disk full at .*disk: needs 8 MB, free 2\.\d+ MB"):
            save(directory, 2, {"weight": torch.ones(2_000_000)})
        assert directory.names() == [old.name]
        verify(old)
    finally:
        directory.close()


def test_a_disk_that_fills_up_while_writing_is_told_the_same_way(small_disk, monkeypatch):
    directory = Directory(small_disk)
    monkeypatch.setattr(writer, "_require_space", lambda path, needed: None)  # the space went after it was looked at
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002: disk full at .*disk: needs 8 MB, free \d\.\d+ MB"):
            save(directory, 2, {"weight": torch.ones(2_000_000)})
        assert [entry.name for entry in small_disk.iterdir() if "step" in entry.name] == []
        verify(save(directory, 3, {"weight": torch.ones(10)}))
    finally:
        directory.close()


def test_a_read_only_file_system_is_named(small_disk):
    directory = Directory(small_disk)
    old = save(directory, 1, {"weight": torch.ones(10)})
    directory.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=f"cannot keep checkpoints in {small_disk}: the file system is read-only"):
        Directory(small_disk)
    verify(old)


def test_nothing_is_written_outside_the_umask(directory):
    old = os.umask(0o077)
    try:
        folder = save(directory, 1, {"weight": torch.ones(3)})
    finally:
        os.umask(old)
    assert {oct(entry.stat().st_mode & 0o077) for entry in [folder, *folder.iterdir()]} == {"0o0"}
