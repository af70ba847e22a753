"""Real ranks for every test: they start at their first use and stay until the session ends."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading

import hypothesis
import pytest
import torch

import deadline
import forkserver
from samestep import progress
from samestep.launch.process import start
from samestep.launch.start import prefork_server
from samestep.launch.start.prefork_server import PreforkServer
from samestep.testing import VARIABLES, ranks

EXIT_S = 30.0  # seconds between the summary and the end of the process

# examples are not timed: on a busy machine one takes as long as it takes
hypothesis.settings.register_profile("samestep", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("samestep")


@pytest.fixture(scope="session")
def rank_server():
    """Forks the ranks of all sets, and imports torch once for them."""
    server = PreforkServer(VARIABLES)
    yield server
    server.close()


def sharing(server, size):
    with ranks(size) as run:
        run._fork_server = server
        yield run
        run._fork_server = None  # others use it


@pytest.fixture(scope="session")
def two_ranks(rank_server):
    yield from sharing(rank_server, 2)


@pytest.fixture(scope="session")
def three_ranks(rank_server):
    yield from sharing(rank_server, 3)


@pytest.fixture(scope="session")
def four_ranks(rank_server):
    yield from sharing(rank_server, 4)


@pytest.fixture(scope="session")
def fork_server():
    """Forks what tests start; see forkserver.py."""
    server = forkserver.ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _start_by_forks(request):
    """Lets the fork server start what tests and fixtures start by `subprocess`; it starts at the first use."""
    first_use = threading.Lock()

    def server():
        with first_use:  # a test may start processes on several threads
            return request.getfixturevalue("fork_server")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forkserver.Popen)
        patch.setattr(forkserver.Popen, "server", server)
        patch.setattr(prefork_server, "start", lambda *args, keep: server().prefork_server(*args, keep=keep))
        yield


@pytest.fixture(autouse=True)
def _start_fresh_interpreters(request, monkeypatch):
    if request.node.get_closest_marker("fresh_interpreter") is not None:
        monkeypatch.setattr(forkserver.Popen, "server", None)
        monkeypatch.setattr(prefork_server, "start", start)


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
    """Holds promises of seconds to the letter where the long sweeps run one after the other."""
    alone = config.option.markexpr == "prove" and "PYTEST_XDIST_WORKER" not in os.environ
    deadline.hold_to(0.0 if alone else deadline.BUSY)
    for number in (signal.SIGINT, signal.SIGHUP):  # ignored under nohup and in the background: tests send them
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """Makes garbage collections cheap, which end every world: they pass over what the collection of tests has made."""
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    gc.set_threshold(20_000, 20, 20)  # collections of this process, which no test is about, took a tenth of its time
    if len(session.items) > 500:
        importlib.import_module("torch._dynamo")  # the first optimizer does
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Freezes what a file of tests has left, too: else collections take longer from file to file."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


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
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=sys.__stderr__)
