"""The agent that imports torch ahead: begun only for what it fits, taken only for that, and dropped else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samestep.launch.start import early_agent


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("-n 4 train.py", 4),
        ("--nproc-per-node=2 --restarts 3 --run-dir runs/a -m train", 2),
        ("--pin --json=out.json -n 3 train.py -n 7 --hosts a", 3),
        ("-n 1 train.py", 0),
        ("-n auto train.py", 0),
        ("train.py -n 4", 0),
        ("-n 4 --hosts a,b train.py", 0),
        ("-n 4 --start spawn train.py", 0),
        ("-n 4 --dry-run train.py", 0),
        ("-n", 0),
        ("", 0),
    ],
)
def test_what_can_be_seen_at_a_glance(line, ranks):
    assert early_agent.requested_ranks(line.split()) == ranks


SCRIPT = """
import os, sys
from samestep.launch.start import early_agent
early_agent.begin({arguments!r})
{then}
early_agent.discard()
try:
    print("children" if os.waitpid(-1, os.WNOHANG) else "")
except ChildProcessError:
    print("no child is left")
"""


def fresh(arguments, then, **variables):
    """Runs it in an interpreter that has not imported torch; returns what it prints."""
    environment = {
        name: value for name, value in os.environ.items() if name not in early_agent.TASK_VARIABLES
    } | variables
    code = SCRIPT.format(arguments=arguments.split(), then=then)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_an_agent_that_nobody_takes_is_dropped():
    assert fresh("-n 2 train.py", "print(len(early_agent._waiting))") == ["1", "no child is left"]


def test_one_begun_for_another_number_is_not_taken():
    assert fresh("-n 2 train.py", "print(early_agent.claim(4))") == ["None", "no child is left"]


def test_tasks_of_another_launcher_begin_none():
    assert fresh("-n 2 train.py", "print(len(early_agent._waiting))", PMI_RANK="0") == ["0", "no child is left"]


@pytest.mark.prove
def test_it_serves_once_torch_is_imported():
    then = """
from samestep.launch.link import Link
process, end = early_agent.claim(2)
link = Link(end)
link.send({"kind": "bind", "address": "127.0.0.1"})
while not (messages := link.receive()):
    pass
print(messages[0].kind)
end.close()
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
    assert fresh("-n 2 train.py", then) == ["bound", "0", "no child is left"]
