"""What several tests of checkpoints need from the machine."""

from __future__ import annotations

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, where this user may mount one."""
    yield from mounted(tmp_path / "disk", "4m")


@pytest.fixture
def small_disk_of_five(tmp_path):
    """A file system of 5 MiB, likewise."""
    yield from mounted(tmp_path / "disk", "5m")


def mounted(disk, size):
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "samestep-test", str(disk)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        pytest.skip(f"this user may not mount a small file system: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
