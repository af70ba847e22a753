"""Real ranks for every test: processes start at a set's first use and stay until the session ends."""

from __future__ import annotations

import faulthandler
import os
import sys

import pytest

import deadline
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
