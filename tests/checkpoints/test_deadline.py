"""Shortly before a job's time is over, all ranks save the same step and leave; rank 0's clock decides when."""

from __future__ import annotations

import threading
import time
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch

import samestep
from samestep.checkpoints import shutdown
from samestep.checkpoints.shutdown import Deadline, parse_time_limit, slurm_deadline
from samestep.checkpoints.writer import AsyncWriter
from samestep.errors import Preempted, UsageError
from samestep.testing import assert_same_bits

STEPS = 8  # of an epoch


# --- when it is near ----------------------------------------------------------------------------


def limit_after(gaps, ends=10_000.0):
    limit, now = Deadline(ends, 0.0), 500.0
    limit.note_step(now)
    for gap in gaps:
        limit.note_step(now := now + gap)
    return limit


@pytest.mark.parametrize(
    ("gaps", "save", "margin"),
    [
        ([], 0.0, 20.0),  # nothing is known
        ([0.1, 0.2, 0.1], 0.5, 20.0),
        ([1.0, 9.0, 1.0], 0.0, 20.0),
        ([1.0, 9.0, 1.0], 3.0, 24.0),
        ([0.5], 60.0, 121.0),
        ([300.0] + [1.0] * 199, 20.0, 640.0),
        ([300.0] + [1.0] * 200, 20.0, 42.0),  # long ago
    ],
)
def test_the_margin_has_room_for_two_steps_and_two_saves_as_long_as_the_slowest_of_late(gaps, save, margin):
    limit = limit_after(gaps)
    assert limit.margin(save) == pytest.approx(margin)
    assert not limit.is_near(10_000 - margin - 0.01, save)
    assert limit.is_near(10_000 - margin + 0.01, save)


def test_of_a_short_job_a_tenth_is_the_least_margin():
    assert limit_after([], ends=60.0).margin(0.0) == 6.0


@pytest.mark.parametrize(
    ("given", "ends"),
    [(90, 1090.0), (0.5, 1000.5), ("2 h", 8200.0), ("90 min", 6400.0), (float("inf"), None), (None, None)],
)
def test_a_limit_counts_from_now(given, ends):
    limit = parse_time_limit(given, 1000.0)
    assert (limit and limit.at) == ends


@pytest.mark.parametrize(("told", "ends"), [("5000", 5000.0), ("", None), ("soon", None), ("0", None), (None, None)])
def test_slurm_says_when_the_job_ends(told, ends, monkeypatch):
    for name in ("SLURM_JOB_END_TIME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    if told is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", told)
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(time=lambda: 4000.0))
    limit = slurm_deadline(1000.0)
    assert (limit and limit.at + 3000.0) == ends


SCONTROL = """#!/bin/sh
[ "$*" = "--oneliner show job 17" ] && [ "$SLURM_TIME_FORMAT" = standard ] || exit 9
echo 'JobId=17 JobName=sh RunTime=00:00:00 StartTime=2026-11-21T10:58:06 {} Deadline=N/A'
"""


@pytest.mark.parametrize(
    "told", ["EndTime=2026-11-21T11:01:06", "EndTime=Unknown", "EndTime=9999-99-99T99:99:99", None]
)
def test_where_it_does_not_it_is_asked(told, monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("PATH", str(tmp_path))
    if told is not None:
        (tmp_path / "scontrol").write_text(SCONTROL.format(told))
        (tmp_path / "scontrol").chmod(0o755)
    limit = slurm_deadline(1000.0)
    if told == "EndTime=2026-11-21T11:01:06":
        ends = datetime(2026, 11, 21, 11, 1, 6).timestamp()  # noqa: DTZ001  (Slurm's is this host's)
        assert limit.at - 1000.0 == pytest.approx(ends - time.time(), abs=5.0)
    else:
        assert limit is None


@pytest.mark.parametrize("given", [0, -3, True, "soon", "5 epochs", "100", [3], float("nan")], ids=repr)
def test_what_is_no_time_is_refused(given):
    with pytest.raises(UsageError, match="is no time; give seconds"):
        parse_time_limit(given, 1000.0)


def test_a_checkpoint_refuses_what_is_no_time_before_it_makes_a_folder(tmp_path):
    with samestep.world(device="cpu") as world, pytest.raises(UsageError, match="is no time; give seconds"):
        samestep.checkpoint(tmp_path / "new", world, time_limit="soon", model=torch.nn.Linear(2, 1))
    assert not (tmp_path / "new").exists()


def test_a_write_is_timed_whether_it_fails_or_not():
    writer = AsyncWriter()

    def refuse():
        raise OSError(28, "No space left on device")

    for write in (lambda: None, refuse):
        writer.start(1, write)
        writer.wait()
    assert len(writer.write_seconds) == 2
    assert all(0 <= seconds < 10 for seconds in writer.write_seconds)


@pytest.mark.parametrize("is_running", [False, True], ids=["before it runs", "while it runs"])
def test_an_interrupt_while_the_writing_begins_loses_no_write(is_running, monkeypatch, tmp_path):
    begin = threading.Thread.start

    def interrupted(thread):
        if is_running:
            begin(thread)
        raise KeyboardInterrupt

    writer, written = AsyncWriter(), []
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.start(7, lambda: written.append(7) or tmp_path)
    outcome = writer.wait()
    assert outcome is not None
    assert (outcome.step, outcome.folder, written) == (7, tmp_path, [7])
    assert writer.wait() is None


# --- and then -----------------------------------------------------------------------------------


def train(path, limits, save_takes=0.0, with_data=True, epochs=3):
    """Trains while this rank's clock, which begins at its own hour, runs 1 s a step on rank 0 and a day on the others.

    Returns the step at which it left, or None; the steps it took; the weights.
    """
    now, kept = [1000.0], shutdown.time
    shutdown.time = SimpleNamespace(monotonic=lambda: now[0], time=kept.time)
    try:
        with samestep.world(device="cpu") as world:
            model = samestep.replicate(torch.nn.Linear(1, 1, dtype=torch.float64), world)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            data = torch.utils.data.TensorDataset(torch.arange(4.0 * STEPS, dtype=torch.float64)[:, None])
            batches = samestep.shards(data, world, batch_size=4)
            named = {"model": model, "optimizer": optimizer} | ({"data": batches} if with_data else {})
            state = samestep.checkpoint(path, world, time_limit=limits, **named)
            if save_takes:
                state._store._writer.write_seconds.append(save_takes)
            try:
                for _ in state.epochs(epochs):
                    for (x,) in batches:
                        batches.mean(model(x).square().squeeze(1)).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        now[0] += 1.0 if world.is_first else 86_400.0
                        state.commit()
            except Preempted as left:
                return left.step, state.step, model.state_dict()
            return None, state.step, model.state_dict()
    finally:
        shutdown.time = kept


# Requested when 1000 + k >= 1000 + limit - margin, margin = max(limit / 10, 2 x (1 s + save)); all leave a step later.
@pytest.mark.parametrize(("limit", "save", "left"), [(12, 2.0, 7), (20, 5.0, 9), (40, 0.0, None)])
def test_all_ranks_leave_behind_the_same_step_and_go_on_from_there(tmp_path, two_ranks, limit, save, left):
    told = two_ranks(train, str(tmp_path), limit, save)
    assert [one[:2] for one in told] == [(left, left or 3 * STEPS)] * 2
    again = two_ranks(train, str(tmp_path), None)
    whole = two_ranks(train, str(tmp_path / "whole"), None)
    assert [one[:2] for one in again] == [(None, 3 * STEPS)] * 2
    assert_same_bits(again[0][2], whole[0][2])


def test_it_is_said_once_with_the_margin(tmp_path, capsys):
    assert train(tmp_path, 12, 2.0)[0] == 7
    said = capsys.readouterr().err
    assert said.count("samestep: the time limit is 6 s away, a last step and save may take 6 s") == 1
    assert said.count("time limit") == 1
    assert f"samestep: out of time: saved step 7 to {tmp_path}/step-00000007" in said


def test_what_slurm_says_is_the_limit_where_the_script_says_none(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(2_000_000_012))
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(time=lambda: 2_000_000_000.0))
    assert train(tmp_path, None, 2.0)[0] == 7
    assert train(tmp_path / "whole", "2 h")[0] is None


def test_one_rank_without_data_leaves_at_once(tmp_path):
    assert train(tmp_path, 12, 2.0, with_data=False)[0] == 6


def refused(path, given):
    with samestep.world(device="cpu") as world:
        try:
            samestep.checkpoint(path, world, time_limit=given, model=torch.nn.Linear(2, 1)).close()
        except UsageError as error:
            return str(error)


def test_several_ranks_without_data_have_no_means_to_agree(tmp_path, two_ranks):
    for message in two_ranks(refused, str(tmp_path), "2 h"):
        assert "2 ranks agree on the step to save through the reports of their data" in message
    assert two_ranks(refused, str(tmp_path), float("inf")) == [None, None]
    assert two_ranks(refused, None, "2 h") == [None, None]  # nothing is saved, so nobody leaves
