"""The head listens for life before any rank runs, too: who imports cannot speak, but its kernel answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from namespaces import hosts
from test_hosts import finish
from test_versions import other_version_on

from deadline import in_time
from samestep._version import __version__

SILENCE = 5.0  # of `samestep run` here
IMPATIENT = [str(Path(__file__).with_name("impatient.py"))]


@pytest.fixture
def lab(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("lab"), 2) as own:
        yield own


@pytest.fixture
def start(lab, folder):
    """Starts a run in which the second host takes so long to import torch."""

    def begin(seconds, *options):
        python = other_version_on(lab, "node2", folder.path, __version__)
        team = folder.path / f"samestep-{__version__}" / "samestep" / "launch" / "local_ranks.py"
        wait = f"        import time; open('importing', 'w').close(); time.sleep({seconds})\n"
        text = team.read_text()
        head, line, rest = text.partition("        self._forks = False\n")
        team.write_text(head + wait + line + rest)
        words = ["--hosts", "node1,node2", "--ssh-args", lab.ssh_args, "--remote-python", python, "-n", 1]
        words += ["--json", folder.json, *options]
        return folder.start(*words, folder.script("join()\nprint(meet())"), program=IMPATIENT)

    return begin


@pytest.mark.prove
def test_a_host_that_imports_for_long_is_not_lost(start, folder):
    code, out, err = finish(start(SILENCE + 2))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] 2", "[rank 1] 2"]


def cut_off_while_it_imports(lab, folder):
    while not (folder.path / "importing").exists():
        time.sleep(0.02)  # the test's own deadline ends this
    lab.partition("node2")


@pytest.mark.prove
def test_a_host_that_is_cut_off_while_it_imports_is_lost(lab, start, folder):
    process = start(600)
    cut_off_while_it_imports(lab, folder)
    cut_at = time.monotonic()
    code, _, err = finish(process)
    assert in_time(time.monotonic() - cut_at, SILENCE + 5)
    assert code == 1
    assert f"host node2 is lost: no heartbeat for {SILENCE:.0f} s" in err
    assert folder.result["failure"]["host"] == "node2"


@pytest.mark.prove
def test_a_run_that_loses_a_host_before_its_ranks_begin_goes_on_with_the_others(lab, start, folder):
    process = start(600, "--restarts", 1, "--lost-host", "continue")
    cut_off_while_it_imports(lab, folder)
    code, out, err = finish(process)
    assert code == 0, err
    assert "restart 1 of 1: the rank starts again, 2 before" in err
    assert out.splitlines() == ["1"]
