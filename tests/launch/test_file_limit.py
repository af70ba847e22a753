"""More ranks than files may usually be open for."""

from __future__ import annotations

import resource
import socket

import pytest

from samestep.launch.link import Link

FEW = 40


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.prove)])
def test_ranks_start_where_few_files_may_be_open_and_see_that_limit_themselves(folder, start):
    script = folder.script("import resource\nprint('limit', *resource.getrlimit(resource.RLIMIT_NOFILE))")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = folder.run("-n", 10, "--start", start, script, preexec_fn=lambda: few(hard))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"limit {FEW} {hard}") == 10


def few(hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))


def test_a_link_is_waited_for_whatever_its_descriptor_is():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    kept = [[*map(Link, socket.socketpair())] for _ in range(520)]
    try:
        ours, theirs = kept[-1]
        assert ours.fileno() >= 1024
        ours.send({"kind": "output"}, b"x" * 8_000_000)
        ours.drain(0.01)
        while not (found := theirs.receive()):
            ours.drain(0.01)
        assert len(found[0].payload) == 8_000_000
    finally:
        for link in (link for both in kept for link in both):
            link.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
