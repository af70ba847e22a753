"""Runs of `samestep verify` that are forked: what was imported before the script is watched none the less."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from samestep.verification.files import Files
from samestep.verification.runner import Runner, fork_server_for
from samestep.verification.runs import Script

UNWATCHED = """
    import json, os, pathlib, sys, types

    def import_all():
        import torch.distributed.fsdp, torch.utils.data, torch._dynamo
        from samestep.launch.start.fork import preimport
        assert preimport("import samestep", pathlib.Path(os.devnull)) is None

    def written_by_us(value):
        ours = ("samestep.instrument", "samestep.launch")
        function = type(value) is types.FunctionType and hasattr(value, "__wrapped__")
        return function and value.__globals__["__name__"].startswith(ours)

    def begin():
        from samestep.launch.rank import progress_notes
        from samestep.launch.rank.observers import RankContext
        from samestep.verification.recording.recorder import Recorder

        progress_notes.begin()
        Recorder().begin(RankContext(rank=0, size=1))

    (import_all(), begin()) if sys.argv[1] == "before" else (begin(), import_all())
    names = {(m, n): v for m, module in [*sys.modules.items()] for n, v in [*getattr(module, "__dict__", {}).items()]}
    changed, originals = [], set()
    for name, value in names.items():
        if written_by_us(value):
            changed.append(name)
            while hasattr(value, "__wrapped__"):
                originals.add(id(value := value.__wrapped__))
    left = [f"{m}.{n}" for (m, n), v in names.items() if id(v) in originals]
    print(json.dumps([sorted(f"{m}.{n}" for m, n in changed), sorted(left)]))
"""

TRAIN = """
    import os, sys
    {first}
    print("told", "torch" in sys.modules, hash("a text"))
"""


def names(when: str, folder: Path) -> tuple[list[str], list[str]]:
    order = json.dumps({"folder": str(folder / when), "steps": None, "saves": str(folder / "saves")})
    program = [sys.executable, "-P", "-c", textwrap.dedent(UNWATCHED), when]
    told = subprocess.run(
        program, env=os.environ | {"SAMESTEP_VERIFY": order}, capture_output=True, text=True, check=False
    )
    assert not told.returncode, told.stderr
    changed, left = json.loads(told.stdout)
    return changed, left


@pytest.mark.prove
def test_what_was_imported_before_is_changed_wherever_somebody_has_it(tmp_path: Path) -> None:
    changed, left = names("before", tmp_path)
    assert "torch.distributed.fsdp.fully_shard" in changed
    assert (changed, left) == names("afterwards", tmp_path)
    assert not [name for name in left if name.startswith("samestep")]


@pytest.mark.fresh_interpreter
@pytest.mark.parametrize(
    ("first", "forked"),
    [
        pytest.param("", True, id="forked", marks=pytest.mark.prove),
        pytest.param("os.environ['OMP_NUM_THREADS'] = '1'", False, id="fresh"),
    ],
)
def test_ranks_are_forked_with_one_seed_unless_the_script_must_find_no_torch(
    tmp_path: Path, first: str, forked: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN.format(first=first)), encoding="utf-8")
    script = Script(program=str(path))
    with fork_server_for(script, 2) as fork_server:
        runner = Runner(
            script=script,
            ranks=2,
            folder=tmp_path,
            files=Files([], tmp_path),
            still_s=60.0,
            say=lambda _: None,
            fork_server=fork_server,
        )
        runs = [runner.first(64, 0), runner.recorded("again", 2), runner.recorded("alone", 1)]
    said = [sorted(re.findall(r"told (\w+) (-?\d+)", run.ended.tail())) for run in runs]
    first_of_all, again, alone = ([there for there, _ in ranks] for ranks in said)
    assert (first_of_all, again, alone) == (["False"] * 2, [str(forked)] * 2, [str(forked)])
    assert said[0][0] != said[0][1]  # the hashes of two ranks
    assert said[2][0][1] in {number for _, number in said[0]}  # that of rank 0
    assert (said[1][0][1] == said[1][1][1]) == forked


@pytest.mark.fresh_interpreter
@pytest.mark.prove
def test_fresh_interpreters_go_on_where_the_process_that_forks_has_been_killed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN.format(first="")), encoding="utf-8")
    script = Script(program=str(path))
    with fork_server_for(script, 2) as fork_server:
        assert fork_server is not None
        assert fork_server.why_unavailable() is None
        os.kill(fork_server._process.pid, signal.SIGKILL)
        while not fork_server.has_ended():
            os.sched_yield()
        runner = Runner(
            script=script,
            ranks=2,
            folder=tmp_path,
            files=Files([], tmp_path),
            still_s=60.0,
            say=lambda _: None,
            fork_server=fork_server,
        )
        run = runner.recorded("again", 2)
    assert run.ended.code == 0
    assert "told False" in run.ended.tail()


WAITS = """
    import os, sys, time
    if "torch" in sys.modules:
        print(os.getpid(), os.getppid(), file=open(sys.argv[1], "w"), flush=True)
        time.sleep(600)
"""


@pytest.mark.fresh_interpreter
@pytest.mark.prove
def test_a_verification_that_is_killed_takes_a_forked_run_along(tmp_path: Path) -> None:
    path, pids = tmp_path / "train.py", tmp_path / "pids"
    path.write_text(textwrap.dedent(WAITS), encoding="utf-8")
    os.mkfifo(pids)
    command = [sys.executable, "-m", "samestep", "verify", str(path), str(pids)]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, **nowhere) as verification:
        rank, agent = map(int, pids.read_text(encoding="ascii").split())
        handles = [os.pidfd_open(rank), os.pidfd_open(agent)]
        verification.kill()
    for handle in handles:
        assert select.select([handle], [], [], 20)[0]
        os.close(handle)
