"""`samestep run` as a user starts it, on scripts written for the occasion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

PREPARE = """\
import os, signal, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def join():
    global torch, dist
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
def meet():
    value = torch.ones(2)
    dist.all_reduce(value)
    return int(value[0])
"""


class Folder:
    """A working directory with scripts, and the runs started in it."""

    def __init__(self, path):
        self.path = path
        self.started = []
        self.json = path / "result.json"

    def script(self, body, name="train.py"):
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PREPARE + textwrap.dedent(body))
        return name

    def start(self, *arguments, **options):
        """Starts `samestep run` and returns at once; `env` is added to its environment, None removes a variable.

        The number of threads is that of the session's fork server, so that ranks can be forked.
        """
        removed = dict.fromkeys(("GLOO_SOCKET_IFNAME", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES"))
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **removed, **options.pop("env", {})}
        environment = {name: value for name, value in environment.items() if value is not None}
        program = options.pop("program", ["-P", "-m", "samestep"])
        command = [sys.executable, *program, "run", *map(str, arguments)]
        self.started.append(subprocess.Popen(command, cwd=self.path, env=environment, text=True, **options))
        return self.started[-1]

    def close(self):
        """Ends what a failed test has left running, so that no other test meets it."""
        for process in self.started:
            process.terminate()  # a launcher ends its ranks
            with process:  # closes the pipes
                try:
                    process.communicate(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()  # its ranks end with it

    def run(self, *arguments, **options):
        """Runs `samestep run` to its end; returns it with `stdout` and `stderr` as text."""
        process = self.start("--json", self.json, *arguments, **options)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @property
    def result(self):
        return json.loads(self.json.read_text())

    def logs(self):
        """Returns every file that the ranks of the one run wrote, by name."""
        files = self.path.glob("runs/*/0/*/*")
        return {file.name: file.read_text() for file in files if file.is_file()}


@pytest.fixture
def folder(tmp_path):
    one = Folder(tmp_path)
    yield one
    one.close()
