"""One changed byte anywhere is noticed; the checkpoint is set aside and the one before it is used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samestep.checkpoints.directory import CheckpointDirectory
from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.integrity import latest_intact, read_manifest, verify
from samestep.checkpoints.manifest import SCHEMA, Manifest
from samestep.checkpoints.reader import read_tensors
from samestep.checkpoints.writer import write
from samestep.errors import CheckpointError


@pytest.fixture
def directory(tmp_path):
    opened = CheckpointDirectory(tmp_path)
    yield opened
    opened.close()


def save(directory, step):
    encoder = Encoder()
    state = {"model": encoder.encode({"weight": torch.full((40,), float(step))}, "model")}
    return write(directory, Manifest(SCHEMA, step, 0, 1, "1", "2", {}, state, None), encoder.tensors)


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.data())
def test_no_changed_byte_goes_unnoticed(directory, data):
    for name in directory.names():
        directory.quarantine(name)
    folder = save(directory, 1)
    path = folder / data.draw(st.sampled_from(["tensors.safetensors", "manifest.json"]))
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises(CheckpointError):
        verify(folder)


def test_files_swapped_between_checkpoints_are_noticed(directory):
    one, two = save(directory, 1), save(directory, 2)
    (one / "tensors.safetensors").replace(two / "tensors.safetensors")
    with pytest.raises(CheckpointError, match="SHA-256"):
        verify(two)


def test_a_checkpoint_renamed_to_another_step_is_noticed(directory):
    folder = save(directory, 1)
    renamed = folder.rename(folder.with_name("step-00000009"))
    with pytest.raises(CheckpointError, match="the folder is step-00000009, its manifest is of step 1"):
        verify(renamed)


def test_a_directory_without_checkpoints_has_no_newest(directory):
    assert latest_intact(directory) is None


def test_a_run_does_not_silently_begin_anew_when_every_checkpoint_is_damaged(directory):
    for step in (1, 2):
        flip(save(directory, step) / "tensors.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be trusted, 2 quarantined .*start again"):
        latest_intact(directory)
    assert latest_intact(directory) is None  # started again


def test_a_payload_that_is_not_what_the_manifest_lists_is_refused(directory):
    folder = save(directory, 1)
    manifest = read_manifest(folder)
    manifest.tensors["model/weight"]["dtype"] = "int32"
    with pytest.raises(CheckpointError, match="another header than"):
        read_tensors(folder, manifest)
