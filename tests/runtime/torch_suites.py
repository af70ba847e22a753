"""Runs scripts/torch_suite.py, PyTorch's own tests, for several test files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mpi_jobs import AS_ROOT

SUITE = Path(__file__).parents[2] / "scripts" / "torch_suite.py"


def failures(*options, timeout):
    """Returns the exit code, and what was printed where it is not 0."""
    command = [sys.executable, str(SUITE), *options]
    environment = {**os.environ, **AS_ROOT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    assert " passed" in done.stdout, done.stderr
    return done.returncode, done.stdout if done.returncode else ""
