"""A rank's steps in pieces: they add up, bear the right names, and are seen in scripts that know nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from samestep import events, progress
from samestep.launch.rank import timeline
from samestep.launch.rank.observers import RankContext
from samestep.launch.rank.timeline import Timeline
from samestep.reporting.run_log import Run, open_run

Events = list[dict[str, Any]]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def monotonic(self) -> float:
        return self.now / 1e9

    def monotonic_ns(self) -> int:
        return self.now

    def passes(self, milliseconds: int) -> None:
        self.now += 1_000_000 * milliseconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeline, "time", clock)
    return clock


@pytest.fixture
def written(tmp_path: Path, clock: Clock) -> Iterator[Callable[[], Events]]:
    """Ends this process's rank, and returns what it wrote."""
    progress.attach(progress.create())
    one = Timeline()
    one.begin(RankContext(rank=3, size=4, folder=tmp_path))

    def end() -> Events:
        one.end(None)
        return list(events.Reader(tmp_path / "rank3.events.jsonl").events())

    yield end
    progress.detach()
    events.detach()


def test_a_rank_that_merely_lost_the_others_says_so(tmp_path: Path) -> None:
    one = Timeline()
    one.begin(RankContext(rank=0, size=2, folder=tmp_path))
    one.end(RuntimeError("[/a/pair.cc:553] Connection closed by peer [127.0.0.1]:9. This is typically caused by …"))
    events.detach()
    *_, end = events.Reader(tmp_path / "rank0.events.jsonl").events()
    assert end["error"] == "lost its peers: Connection closed by peer [127.0.0.1]:9"


def steps(written: Events) -> Events:
    return [event for event in written if event["kind"] == "step"]


def phase(clock: Clock, name: str, milliseconds: int) -> None:
    progress.set_phase(name)
    clock.passes(milliseconds)


def step(clock: Clock) -> None:
    """10 ms of data, 20 forward, 30 backward, of them 12 waiting, 5 for the rest, 8 in the optimizer."""
    phase(clock, "data", 10)
    phase(clock, "train", 20)
    phase(clock, "backward", 18)
    progress.gradients_ready()
    clock.passes(12)
    progress.backward_done()
    phase(clock, "train", 5)
    phase(clock, "optimizer", 8)
    progress.set_phase("train")
    progress.count_step()


def test_a_steps_pieces_have_their_names_and_add_up(written: Callable[[], Events], clock: Clock) -> None:
    step(clock)
    step(clock)
    _, second, rest = steps(written())
    seconds = {"data": 0.010, "forward": 0.020, "backward": 0.018, "wait": 0.012, "other": 0.005, "optimizer": 0.008}
    assert second["spent"] == seconds
    assert second["seconds"] == pytest.approx(sum(seconds.values()))
    assert [span[0] for span in second["spans"]] == ["data", "forward", "backward", "wait", "other", "optimizer"]
    assert second["spans"][3] == ["wait", 48000, 12000]
    assert (second["step"], second["steps"], rest["steps"]) == (2, 1, 0)


def test_every_micro_batch_has_its_own_pieces(written: Callable[[], Events], clock: Clock) -> None:
    for _ in range(2):
        phase(clock, "data", 1)
        phase(clock, "train", 2)
        phase(clock, "backward", 3)
        progress.backward_done()
    phase(clock, "train", 4)
    progress.count_step()
    first = steps(written())[0]
    assert [span[0] for span in first["spans"]] == ["data", "forward", "backward"] * 2 + ["other"]
    assert first["spent"] == {"data": 0.002, "forward": 0.004, "backward": 0.006, "other": 0.004}


def test_a_collective_of_the_script_is_named_with_its_line(written: Callable[[], Events], clock: Clock) -> None:
    phase(clock, "train", 1)
    progress.enter_collective("all_reduce", "train.py:7")
    clock.passes(5)
    progress.exit_collective()
    clock.passes(1)
    progress.count_step()
    first = steps(written())[0]
    assert first["spans"][1] == ["collective", 1000, 5000, "all_reduce", "train.py:7"]
    assert first["spent"] == {"collective": 0.005, "other": 0.002}


@pytest.mark.parametrize("name", ["evaluate", "save", "load", "data"])
def test_what_is_no_training_counts_whole(written: Callable[[], Events], clock: Clock, name: str) -> None:
    progress.set_phase(name)
    clock.passes(3)
    progress.enter_collective("all_reduce", "train.py:7")
    clock.passes(4)
    progress.exit_collective()
    progress.set_phase("")
    progress.count_step()
    assert steps(written())[0]["spent"] == {name: 0.007}


def test_other_threads_collectives_are_not_the_scripts(written: Callable[[], Events], clock: Clock) -> None:
    phase(clock, "train", 1)
    other = threading.Thread(
        target=lambda: (progress.enter_collective("all_reduce", "x:1"), progress.exit_collective())
    )
    other.start()
    other.join()
    progress.count_step()
    assert [span[0] for span in steps(written())[0]["spans"]] == ["other"]


def test_a_run_that_goes_on_counts_from_there(written: Callable[[], Events], clock: Clock) -> None:
    progress.resume_from(100)
    step(clock)  # the optimizer's own count is not asked any more
    progress.set_step(101)
    assert [(each["step"], each["steps"]) for each in steps(written())] == [(101, 1), (101, 0)]


def test_what_lasts_is_told_before_it_is_over(
    written: Callable[[], Events], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PERIOD", 3600.0)  # this test looks itself
    look = events._files[0]._look
    phase(clock, "train", 1999)
    look()
    progress.enter_collective("all_reduce", "train.py:7")
    clock.passes(2000)
    look()
    look()
    progress.exit_collective()
    phase(clock, "backward", 2500)
    look()
    progress.gradients_ready()
    clock.passes(100)
    progress.count_step()
    told = [event for event in written() if event["kind"] == "at"]
    assert [(event["phase"], event["operation"], event["site"]) for event in told] == [
        ("collective", "all_reduce", "train.py:7"),
        ("backward", None, None),
    ]
    assert told[1]["t"] - told[0]["t"] == pytest.approx(2.0, abs=1e-3)


def test_buckets_have_the_times_that_are_known(written: Callable[[], Events], clock: Clock) -> None:
    phase(clock, "backward", 2)
    progress.bucket_filled(0, 4096, begun=True)
    clock.passes(1)
    progress.bucket_filled(1, 8192, begun=False)
    clock.passes(1)
    progress.bucket_reduced(0)
    progress.count_step()
    assert steps(written())[0]["buckets"] == [[0, 4096, 2000, 2000, 4000], [1, 8192, 3000, None, None]]


def test_values_belong_to_the_step_that_was_finished_last(written: Callable[[], Events], clock: Clock) -> None:
    step(clock)
    progress.log_values({"loss": 0.5})
    progress.log_values({"norm": "nan"})
    step(clock)
    progress.log_values({"loss": 0.25})
    told = [(event["step"], event["values"]) for event in written() if event["kind"] == "values"]
    assert told == [(1, {"loss": 0.5, "norm": "nan"}), (2, {"loss": 0.25})]


def test_beyond_ten_thousand_steps_a_line_stands_for_several(
    written: Callable[[], Events], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LINE_FOR_EACH", 4)
    for number in range(1, 10):
        step(clock)
        progress.log_values({"loss": number})
    told = written()
    lines = [(event["step"], event["steps"]) for event in steps(told)]
    assert lines == [(1, 1), (2, 1), (3, 1), (4, 1), (6, 2), (8, 2), (9, 1)]
    assert steps(told)[5]["spent"]["data"] == pytest.approx(0.020)
    kept = {event["step"]: event["values"]["loss"] for event in told if event["kind"] == "values"}
    assert kept[9] == 9
    assert {1, 2, 3} <= set(kept)


def test_a_step_of_very_many_pieces_says_how_many_were_left_out(written: Callable[[], Events], clock: Clock) -> None:
    for _ in range(100):
        phase(clock, "data", 1)
        phase(clock, "train", 1)
    progress.count_step()
    first = steps(written())[0]
    assert (len(first["spans"]), first["more"]) == (timeline.MOST_SPANS, 200 - timeline.MOST_SPANS)
    assert first["spent"] == {"data": 0.1, "other": 0.1}  # all the same


def test_pieces_that_are_too_many_to_be_told_apart_still_add_up(
    written: Callable[[], Events], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MOST_KEPT", 5)
    for _ in range(50):
        phase(clock, "data", 1)
        phase(clock, "train", 2)
    progress.count_step()
    first = steps(written())[0]
    assert first["seconds"] == pytest.approx(0.150)
    assert first["spent"] == pytest.approx({"data": 0.050, "other": 0.100})


# --- real runs ------------------------------------------------------------------------------------

FOREIGN = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    layers = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
    model = DistributedDataParallel(layers, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.ones(96, 128)), batch_size=8):
        model(batch).mean().backward()
        optimizer.step()
    model.eval()
    for (batch,) in DataLoader(TensorDataset(torch.ones(96, 128)), batch_size=8):
        model.module(batch)
    model.train()
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(0)
"""


def run(folder: Any, script: str, *options: str) -> Run:
    done = folder.run("-n", "2", *options, folder.script(script))
    assert done.returncode == 0, done.stderr
    (path,) = (folder.path / "runs").iterdir()
    return open_run(path)


def test_a_script_that_knows_nothing_of_it_is_seen_in_pieces(folder: Any) -> None:
    ranks = run(folder, FOREIGN).attempt(0)
    assert [log.rank for log in ranks] == [0, 1]
    for log in ranks:
        assert [event["step"] for event in log.steps] == [*range(1, 13), 12]
        last, rest = log.steps[-2:]
        names = ["other", "data", "forward", "backward", "wait", "optimizer"]
        assert list(dict.fromkeys(span[0] for span in last["spans"])) == names
        for each in log.steps:
            assert sum(each["spent"].values()) == pytest.approx(each["seconds"], abs=1e-4)
        assert [bucket[0] for bucket in last["buckets"]] == list(range(len(last["buckets"])))
        assert len(last["buckets"]) > 1
        assert all(ready > 0 and begun is done is None for _, _, ready, begun, done in last["buckets"])
        assert rest["spent"]["evaluate"] > 0
        assert [span[3] for span in rest["spans"] if span[0] == "collective"] == ["barrier"]
        assert (log.machine["backend"], log.begin["size"]) == ("gloo", 2)
        assert log.end is not None
        assert log.end["error"] is None


def test_no_events_are_kept_where_nobody_wants_them(folder: Any) -> None:
    assert run(folder, FOREIGN, "--no-events").ranks == {}


PIPELINE = """
    import samestep, torch
    from torch import nn

    with samestep.world(pipeline=2) as world:
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        data = torch.utils.data.TensorDataset(torch.ones(80, 16), torch.ones(80, 16))
        plan = samestep.plan_pipeline(model, data[:16], nn.functional.mse_loss, stages=2, micro_batches=4)
        stage = samestep.pipeline(model, world, plan)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        for batch in samestep.shards(data, world, batch_size=16):
            stage.step(batch)
            optimizer.step()
            optimizer.zero_grad()
"""


def test_stages_wait_for_each_other_and_draw_their_first_steps(folder: Any) -> None:
    ranks = run(folder, PIPELINE).attempt(0)
    for log in ranks:
        assert [event["step"] for event in log.pipelines] == [1, 2, 3]
        told = log.pipelines[0]
        assert told["stages"] == 2
        assert {(stage, number) for _, stage, number, *_ in told["actions"]} == {(log.rank, n) for n in range(4)}
        assert all(0 <= begin <= end for *_, begin, end in told["actions"])
        waits = {span[3] for span in log.steps[2]["spans"] if span[0] == "collective" and len(span) > 3}
        assert f"recv from stage {1 - log.rank}" in waits
        within = [span for span in log.steps[2]["spans"] if span[0] == "collective" and len(span) == 3]
        assert within  # of samestep's own: no line of the script is told to have called them
