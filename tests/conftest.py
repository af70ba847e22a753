"""Real ranks for every test: processes start at a set's first use and stay until the session ends."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys

import pytest

import deadline
import forkserver
from samestep import progress
from samestep.testing import ranks

LEAVING = 30.0  # seconds between the summary and the end of the process


@pytest.fixture(scope="session")
def two_ranks():
    with ranks(2) as run:
        yield run


@pytest.fixture(scope="session")
def three_ranks():
    with ranks(3) as run:
        yield run


@pytest.fixture(scope="session")
def four_ranks():
    with ranks(4) as run:
        yield run


@pytest.fixture(scope="session")
def fork_server():
    """Forks what tests start; see forkserver.py."""
    server = forkserver.ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _start_by_forks(request):
    """Lets the fork server start what tests and fixtures start by `subprocess`; it starts at the first use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forkserver.Popen)
        patch.setattr(forkserver.Popen, "server", lambda: request.getfixturevalue("fork_server"))
        yield


@pytest.fixture(autouse=True)
def _start_fresh_interpreters(request, monkeypatch):
    if request.node.get_closest_marker("fresh_interpreter") is not None:
        monkeypatch.setattr(forkserver.Popen, "server", None)


@pytest.fixture
def record():
    """A record of this process, and a descriptor to read it from."""
    written = progress.create()
    reader = os.dup(written)
    progress.attach(written)
    yield reader
    progress.detach()
    os.close(reader)


def pytest_configure(config):
    """Holds promises of seconds to the letter where the long sweeps run, on a machine that does nothing else."""
    deadline.hold_to(deadline.BUSY if "not prove" in config.option.markexpr else 0.0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Names what fails at once: a run that is cut off has no summary."""
    if report.failed and sys.__stderr__ is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        why = (report.longreprtext.strip() or "no reason given").splitlines()[-1]
        sys.__stderr__.write(f"\nFAILED {report.nodeid} ({report.when}): {why}\n")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Says where python stands, and fails, if it cannot end: a thread or a process that a test left is waited for."""
    if hasattr(config, "workerinput"):
        return  # one of several that test side by side waits for the others, and is ended with them
    faulthandler.dump_traceback_later(LEAVING, exit=True, file=sys.__stderr__)
