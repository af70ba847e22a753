"""What is here beside tests, and how verifications run here: every run is forked from one process of the session.

A verification records its ranks in fresh interpreters, and starts a process of its own that forks the runs after
that. Here one process, which has imported torch once, forks the runs of all verifications, the first ones too. Tests
of how a verification starts its runs have the mark `fresh_interpreter`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest

from forkserver import FRESH
from samestep.launch.process import Process
from samestep.launch.start.prefork_server import PreforkServer
from samestep.verification import runner, runs, verify

# scripts that are run, not imported: the search for doctests would
collect_ignore_glob = ["frameworks/*", "conftest.py", "uses_much_of_torch.py"]


@pytest.fixture(scope="session")
def forks_runs() -> Iterator[PreforkServer]:
    """The process that forks the runs, with one thread each."""
    modules = [observer.partition(":")[0] for observer in (runner._RECORDER, runner._REPLAY)]
    process = PreforkServer({"OMP_NUM_THREADS": "1"}, modules)
    assert process.why_unavailable() is None
    yield process
    process.close()


@pytest.fixture(scope="module", autouse=True)
def _fork_all_runs(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """Has all runs of verifications forked; a module's reports are made while this is in force."""

    def shared(*_: object) -> contextlib.AbstractContextManager[PreforkServer]:
        return contextlib.nullcontext(request.getfixturevalue("forks_runs"))

    def started(
        arguments: list[str], environment: Mapping[str, str], output: int, fork_server: PreforkServer | None
    ) -> Process:
        if (at := arguments.index("--start")) and arguments[at : at + 3] == FRESH:
            arguments = [*arguments[:at], "--start", "fork", *arguments[at + 3 :]]
        return (fork_server or request.getfixturevalue("forks_runs")).command(arguments, environment, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(verify, "fork_server_for", shared)
        patch.setattr(runs, "_start", started)
        yield patch


@pytest.fixture(autouse=True)
def _start_fresh_runs(request: pytest.FixtureRequest, _fork_all_runs: pytest.MonkeyPatch) -> Iterator[None]:
    is_fresh = request.node.get_closest_marker("fresh_interpreter") is not None
    with pytest.MonkeyPatch.context() as patch:
        if is_fresh:
            patch.setattr(verify, "fork_server_for", FORK_SERVER_FOR)
            patch.setattr(runs, "_start", START)
        yield


FORK_SERVER_FOR, START = verify.fork_server_for, runs._start
