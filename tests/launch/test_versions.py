"""Hosts on which samestep is of another version, or missing: said in one line, and soon."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from namespaces import hosts
from test_hosts import FORKED, ONE_THREAD, finish, refused

import samestep
from samestep._version import __version__


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("lab"), 2) as built:
        yield built


@pytest.fixture
def on_hosts(lab, folder):
    def start(*arguments):
        return folder.start("--hosts", "node1,node2", *lab.reached, *FORKED, *arguments, env=ONE_THREAD)

    return start


def other_version_on(lab, host, path, version, only_if=None):
    """Returns an interpreter that has a samestep of another version on one host; the hosts share their files."""
    package = Path(samestep.__file__).parent
    copy = path / f"samestep-{version}"
    shutil.copytree(package, copy / "samestep", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "samestep" / "_version.py").write_text(f'__version__ = "{version}"\n')
    return python_on(lab, host, path, f"export PYTHONPATH={copy}", only_if=only_if)


def python_on(lab, host, path, instead, only_if=None):
    """Returns an interpreter that does something else on one host."""
    python = path / f"python-{host}"
    condition = f'[ "$(hostname)" = {host} ]' + (f" && [ -e {only_if} ]" if only_if else "")
    python.write_text(f'#!/bin/sh\nif {condition}; then {instead}; fi\nexec {lab.python} "$@"\n')
    python.chmod(0o755)
    return python


def test_a_host_of_another_version_is_named_with_both_versions(on_hosts, folder, lab):
    python = other_version_on(lab, "node2", folder.path, "0.0.9")
    line = refused(on_hosts("--remote-python", python, folder.script("open('started', 'w')")))
    told = f"the hosts have different versions of samestep: node1 {__version__}, node2 0.0.9"
    assert line == f"samestep: error: {told}; install the same everywhere"
    assert not (folder.path / "started").exists()


@pytest.mark.prove
def test_hosts_of_one_version_start_though_it_lies_elsewhere(on_hosts, folder, lab):
    python = other_version_on(lab, "node2", folder.path, __version__)
    code, _, err = finish(on_hosts("--remote-python", python, folder.script("")))
    assert code == 0, err


def test_the_one_host_without_samestep_is_named(on_hosts, folder, lab):
    python = python_on(lab, "node2", folder.path, f'exec {sys.executable} -I -S "$@"')
    line = refused(on_hosts("--remote-python", python, folder.script("")))
    assert line.startswith("samestep: error: host node2: samestep is missing there; ")
    assert f"run `{python} -m pip install " in line
