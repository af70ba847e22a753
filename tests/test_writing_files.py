"""What is written is there whole or not at all, and what stands in its place stays what it is."""

from __future__ import annotations

import gzip
import os
import threading

import pytest

from samestep.errors import UsageError
from samestep.files import write_atomic


def test_a_link_stays_a_link_and_its_file_gets_the_text(tmp_path):
    (tmp_path / "there").write_text("something longer")
    (tmp_path / "link").symlink_to("there")
    write_atomic(tmp_path / "link", ["a", "b"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "ab"


def test_a_pipe_is_written_into_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_atomic(tmp_path / "pipe", ["a", "b"])
    reader.join(20)
    assert read == ["ab"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_text_that_ends_early_leaves_the_old_one(tmp_path):
    def pieces():
        yield "half"
        raise UsageError("no more")

    (tmp_path / "page").write_text("old")
    with pytest.raises(UsageError, match="no more"):
        write_atomic(tmp_path / "page", pieces())
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page", "old")]


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    write_atomic(tmp_path / "trace.json.gz", ["a", "b"])
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == b"ab"
