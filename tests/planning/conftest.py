"""Profiles of real scripts, all of them forked from one process that has imported torch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samestep.launch.start.prefork_server import PreforkServer
from samestep.planning.profile import Profile
from samestep.planning.profile_script import OBSERVER, profile_script
from samestep.verification import runs

Measure = Callable[..., Profile]


@pytest.fixture(scope="module")
def nursery() -> Iterator[PreforkServer]:
    """Forks all of these runs, which then need not import torch; with the modules that they would import late."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")  # threads that wait for one another take as long as the machine is busy
        made = PreforkServer(runs.shared_variables(1), [OBSERVER.partition(":")[0], "samestep.planning.build_profile"])
        try:
            assert made.why_unavailable() is None
            yield made
        finally:
            made.close()


@pytest.fixture
def measure(nursery: PreforkServer, tmp_path: Path) -> Measure:
    def measured(source: str, *args: str, steps: int = 5) -> Profile:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return profile_script(path, args, steps=steps, fork_server=nursery)

    return measured
