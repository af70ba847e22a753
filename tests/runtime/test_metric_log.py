"""Numbers that a script logs, and events of ranks that something else than `samestep run` has started."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import samestep
from ports import free_port
from samestep.errors import UsageError
from samestep.reporting.run_log import Run, open_run
from samestep.runtime.world import MetricLog

SCRIPT = """
    import samestep, sys, torch

    with samestep.world(run_dir="run", tensorboard="board") as world:
        model = samestep.replicate(torch.nn.Linear(4, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.ones(24, 4))
        batches = samestep.shards(data, world, batch_size=8)
        state = samestep.checkpoint("saved", world, model=model, optimizer=optimizer, data=batches)
        for epoch in state.epochs(2):
            for (x,) in batches:
                batches.mean(model(x).square().flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.commit()
                world.log(loss=batches.loss, rank=world.rank)
        if "fail" in sys.argv:
            raise ValueError("no\\x1b[31m more")
"""


def run(folder: Path, *command: str, ranks: int | None = None) -> Run:
    """Runs the script, on ranks that are started one by one where there are some."""
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP")}
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment | ({} if ranks is None else variables(rank, ranks, port)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(ranks or 1)
    ]
    for process in started:
        process.wait(100)
    return open_run(folder / "run")


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in told.items()}}


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = reading.EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in files.Scalars(tag)] for tag in files.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("command", "ranks"), [(["train.py"], 2), pytest.param(TORCHRUN, None, marks=pytest.mark.prove)]
)
def test_ranks_of_another_launcher_keep_events_where_the_world_has_a_folder(
    tmp_path: Path, command: Sequence[str], ranks: int | None
) -> None:
    zero, one = run(tmp_path, *command, ranks=ranks).attempt(0)
    for log in (zero, one):
        assert [(event["step"], event["steps"]) for event in log.steps] == [*((n, 1) for n in range(1, 7)), (6, 0)]
        assert log.steps[3]["work"] == {"samples": 4, "weight": 4, "epoch": 1}
        assert {"forward", "backward", "optimizer"} <= set(log.steps[3]["spent"])
        assert log.steps[3]["buckets"][0][4] is not None
        assert log.end is not None
        assert log.end["error"] is None
    losses = [[event["values"]["loss"] for event in log.values] for log in (zero, one)]
    assert losses[0] == losses[1]
    assert [event["values"]["rank"] for event in one.values] == [1.0] * 6
    saved = [(event["step"], event["reason"]) for event in zero.checkpoints]
    assert saved == [(3, None), (6, None)]
    assert zero.checkpoints[0]["bytes"] > 100
    assert board(tmp_path / "board") == {
        "loss": [(step + 1, pytest.approx(loss)) for step, loss in enumerate(losses[0])],
        "rank": [(step, 0.0) for step in range(1, 7)],
    }


def test_a_script_that_nobody_launched_keeps_them_too(tmp_path: Path) -> None:
    (log,) = run(tmp_path, "train.py", "fail").attempt(0)
    assert log.step == 6
    assert log.end is not None
    assert log.end["error"].startswith("ValueError: no")
    assert b"\x1b" not in log.reader.path.read_bytes()  # a person may look at it as it is


def test_a_tensor_of_one_element_is_a_number() -> None:
    with samestep.world() as world:
        world.log(loss=torch.tensor([0.5]), count=3, nothing=math.nan)


@pytest.mark.parametrize(
    ("value", "shown"), [(torch.ones(2), "a Tensor of shape (2,)"), ("much", "a str"), (None, "a NoneType")]
)
def test_what_is_no_number_is_refused_by_its_name(value: object, shown: str) -> None:
    with samestep.world() as world, pytest.raises(UsageError, match=r"log\(loss=…\) takes a number") as refused:
        world.log(loss=value)  # type: ignore[arg-type]
    assert shown in str(refused.value)


def test_without_tensorboard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("samestep.runtime.world.find_spec", lambda _: None)
    for writes in (True, False):
        with pytest.raises(UsageError, match=r"pip install 'samestep\[track\]'"):
            MetricLog(tmp_path, writes=writes)


@pytest.mark.filterwarnings("error")
def test_a_loss_that_still_has_its_graph_is_logged_without_a_warning() -> None:
    weight = torch.ones(1, requires_grad=True)
    MetricLog(None, writes=True).log({"loss": (2 * weight).sum()})


def test_a_number_beyond_every_double_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match="log\\(loss=…\\) takes a number"):
        MetricLog(None, writes=True).log({"loss": 10**400})
