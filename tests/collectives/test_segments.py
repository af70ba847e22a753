"""Memory that processes share is found by two numbers, which a stranger may have written: no file is opened by them."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

from samestep.collectives import segments


def test_what_was_made_for_sharing_is_opened_and_shared():
    mine = segments.Segment(4096)
    try:
        theirs = segments.open_segment(*mine.place, 4096)
        assert theirs is not None
        theirs[7] = 3
        assert mine.map[7] == 3
    finally:
        mine.close()


def test_a_tensors_storage_is_opened_too():
    storage = torch.ones(1000).untyped_storage()
    descriptor, length = storage._share_fd_cpu_()
    assert segments.open_segment(os.getpid(), descriptor, length) is not None


@pytest.mark.parametrize("name", ["notes", "torch_1_2_3", "torch_1_2_3 (deleted)", "memfd:samestep (deleted)"])
def test_no_file_of_this_user_is_opened_for_writing(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine" * 1024)
    with (tmp_path / name).open("r+b") as file:
        assert segments.open_segment(os.getpid(), file.fileno(), 4096) is None


def test_nor_is_one_that_nobody_can_find_any_more():
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        assert segments.open_segment(os.getpid(), file.fileno(), 4096) is None


@pytest.mark.parametrize(
    ("process", "descriptor"),
    [("self", "0"), ("own", "../../../etc/hosts"), ("../..", "x"), ("own", -1), (None, None), (1 << 70, 1)],
)
def test_what_is_no_number_leads_nowhere(process, descriptor):
    assert segments.open_segment(os.getpid() if process == "own" else process, descriptor, 16) is None


def test_memory_that_is_too_short_is_refused():
    mine = segments.Segment(16)
    try:
        assert segments.open_segment(*mine.place, 4096) is None
    finally:
        mine.close()
