"""Killed outright at random moments while it saves beside every step or two, a run always has one whole state to go on.

Each case is one run that is killed again and again, and goes on from what the kill before has left.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field

import exact_cut
import exact_training
import pytest

from samestep.checkpoints.inspection import data_positions, list_checkpoints
from samestep.checkpoints.integrity import verify
from samestep.checkpoints.reader import read_tensors
from samestep.cli import main

LONGEST = 0.2  # seconds of training before a kill, half of that on average
FEW, SOME, MANY = 5, 8, 100  # kills of each case
LAST = 160  # operations on files: those of a start and a resume, and of four saves and more


@dataclass
class Found:
    """What the kills of a run have left."""

    steps: list[int] = field(default_factory=list)
    halves: int = 0  # folders that were being written
    set_aside: int = 0


def examine(path, left):
    """Checks everything that a kill has left in a directory."""
    halves = [entry.name for entry in path.iterdir() if ".tmp-" in entry.name]
    left.halves += bool(halves)
    left.set_aside += sum(".bad" in entry.name for entry in path.iterdir())
    folders = list_checkpoints(path) if any(path.glob("step-*")) else []
    for folder in folders:
        manifest = verify(folder)
        states = dict(data_positions(manifest))
        problems = list(exact_training.differences(manifest, read_tensors(folder, manifest), states["data"]))
        assert not problems, (folder.name, problems)
    if folders:
        told = path.parent / "told.json"
        assert main(["checkpoint", "verify", str(path), "--json", str(told)]) == 0
        assert json.loads(told.read_text())["ok"]
    newest = manifest.step if folders else 0
    assert newest >= max(left.steps, default=0), "a checkpoint that was there is gone"
    left.steps.append(newest)


def let_live(running, marks, stream, first):
    """Lets a run train, or only begin, and returns at a random moment whether it trains."""
    if trains := first or stream.random() < 0.85:  # else it is killed while it starts, resumes or sweeps
        for _ in range(5 if first else 1):  # so many commits have a save behind them that is over
            running.wait_for(marks)
            os.read(marks, 1)
    assert not running.wait_for(seconds=stream.random() * LONGEST), f"it ended by itself{running.output()}"
    return trains


def drain(pipe):
    with contextlib.suppress(BlockingIOError):
        while os.read(pipe, 1 << 16):
            pass


CASES = {
    "alone": (exact_training.__file__, 1, "all"),
    "all of two": (exact_training.__file__, 2, "all"),
    "one of two": (exact_training.__file__, 2, "one"),
    "any": (exact_training.__file__, 0, "any"),
    "cut, all of two": (exact_cut.__file__, 2, "all"),
    "cut, any": (exact_cut.__file__, 0, "any"),
}


def kill_again_and_again(fork_server, folder, case, kills):
    trainer, ranks, victims = CASES[case]
    path, marks, left = folder / "run", folder / "marks", Found()
    path.mkdir()
    os.mkfifo(marks)
    pipe = os.open(marks, os.O_RDWR | os.O_NONBLOCK)
    for number in range(kills):
        stream = exact_training.seeded(number, case)
        size = ranks or stream.choice([1, 2])
        running = fork_server.ranks(f"{trainer}:train", size, folder, str(path), stream.choice([1, 2]), str(marks))
        try:
            trains = let_live(running, pipe, stream, first=number == 0)
            one = victims == "one" or (victims == "any" and stream.random() < 0.5)
            running.kill(*([stream.randrange(size)] if one else []))
            if not trains:  # whom the others still wait for; launchers end them
                running.kill()
        finally:
            codes = running.end(20)
            drain(pipe)
        assert -9 in codes
        examine(path, left)
    os.close(pipe)
    return left


def kill_at_operations(fork_server, folder, numbers):
    """Kills rank 0 of one run at these of its operations on files, counted from each start."""
    path, left = folder / "run", Found()
    path.mkdir()
    os.mkfifo(folder / "marks")
    pipe = os.open(folder / "marks", os.O_RDWR | os.O_NONBLOCK)
    for number in numbers:
        ranks = 1 + number % 2
        running = fork_server.ranks(
            f"{exact_training.__file__}:train_to", ranks, folder, number, str(path), str(folder / "marks")
        )
        try:
            assert running.wait_for(seconds=30), "it was not killed"
        finally:
            assert running.end(20)[0] == -9, running.output()
            drain(pipe)
        examine(path, left)
    os.close(pipe)
    return left


def test_killed_at_an_operation_on_files_every_checkpoint_is_one_whole_state(fork_server, tmp_path):
    left = kill_at_operations(
        fork_server, tmp_path, exact_training.seeded(0, "operations").sample(range(1, LAST), SOME)
    )
    assert left.set_aside == 0


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_killed_at_every_operation_on_files_every_checkpoint_is_one_whole_state(fork_server, tmp_path):
    left = kill_at_operations(fork_server, tmp_path, range(1, LAST))
    assert left.set_aside == 0
    assert left.steps[-1] > 0
    print(f"{LAST - 1} operations, {left.halves} in the middle of a save, {left.steps[-1]} steps")


@pytest.mark.parametrize("case", ["alone", "any", "cut, any"])
def test_killed_at_a_random_moment_every_checkpoint_is_one_whole_state(fork_server, tmp_path, case):
    left = kill_again_and_again(fork_server, tmp_path, case, FEW)
    assert left.set_aside == 0
    assert left.steps[-1] > 0


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_killed_at_many_random_moments_every_checkpoint_is_one_whole_state(fork_server, tmp_path, case):
    left = kill_again_and_again(fork_server, tmp_path, case, MANY)
    assert left.set_aside == 0
    assert left.steps == sorted(left.steps)
    assert left.halves > MANY // 10  # the moments do hit saves
    print(f"{case}: {MANY} kills, {left.halves} in the middle of a save, {left.steps[-1]} steps")
