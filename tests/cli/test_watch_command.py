"""`samestep watch` without a terminal, and with arguments that it cannot follow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def watch(*arguments, cwd, **options):
    command = [sys.executable, "-P", "-m", "samestep", "watch", *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 60} | options
    return subprocess.run(command, cwd=cwd, check=False, **options)


@pytest.fixture
def run(tmp_path):
    """A run of one rank that has taken two steps."""
    folder = tmp_path / "runs" / "train-1"
    (folder / "0" / "node").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"command": ["train.py"], "ranks": 1, "ended": 2e9, "exit": 0}))
    (folder / "0/node/rank0.out").write_text("".join(f"line {number}\n" for number in range(30)))
    head = {"v": 1, "t": 1.9e9, "rank": 0, "attempt": 0}
    begin = {"kind": "begin", "step": 0, "host": "node", "pid": 1, "size": 1, "python": "3.11"}
    lines = [head | begin]
    for step in (1, 2):
        spent = {"steps": 1, "seconds": 0.5, "spent": {"forward": 0.1, "backward": 0.4}}
        lines.append(head | spent | {"kind": "step", "step": step, "spans": [], "more": 0, "buckets": [], "work": {}})
    (folder / "0/node/rank0.events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_one_picture_is_printed_where_there_is_no_terminal(run, tmp_path):
    done = watch(run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(" runs/train-1  1 rank on node  train.py")
    assert " step 2   500 ms a step   2 steps/s\n" in done.stdout
    assert done.stdout.splitlines()[-1] == " line 29"
    assert done.stdout.isprintable() or "\x1b" not in done.stdout


def test_the_newest_run_is_shown_where_none_is_named(run, tmp_path):
    older = tmp_path / "runs" / "older-1"
    older.mkdir()
    (older / "run.json").write_text("{}")
    os.utime(older / "run.json", (1, 1))
    done = watch(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "runs/train-1" in done.stdout.splitlines()[0]


def test_a_reader_that_leaves_is_no_error(run, tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = watch(run, cwd=tmp_path, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_of_another_encoding_gets_what_it_knows(run, tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    (run / "0/node/rank0.out").write_text("größe\n")
    done = watch(run, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert done.stdout.splitlines()[-1] == " gr??e"


def refused(done):
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_what_is_no_run_is_refused_in_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad\x1b[31m\n").mkdir()
    assert "there is no run directory absent" in refused(watch("absent", cwd=tmp_path))
    assert "run.json is a file" in refused(watch(run / "run.json", cwd=tmp_path))
    assert "empty is no run directory" in refused(watch("empty", cwd=tmp_path))
    assert "the newest run in it is runs/train-1" in refused(watch("runs", cwd=tmp_path))
    assert "bad\\x1b[31m\\n is no run directory" in refused(watch("bad\x1b[31m\n", cwd=tmp_path))
    assert "there is no run in ./runs" in refused(watch(cwd=tmp_path / "empty"))
    assert "--rank 1: runs/train-1 has rank 0" in refused(watch("runs/train-1", "--rank", 1, cwd=tmp_path))
    assert "unknown option --onec: did you mean --once?" in refused(watch("--onec", cwd=tmp_path))


def test_the_help_has_examples(tmp_path):
    done = watch("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "samestep watch --once" in done.stdout
