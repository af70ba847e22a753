"""A checkpoint of another run is whole, and not this run's: it is named, set aside, and never trained on."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch
from saved import train

import samestep
from samestep.checkpoints.directory import read_run_id, write_run_id
from samestep.checkpoints.integrity import read_manifest, verify
from samestep.cli import main

NEWEST = "step-00000003"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("mine", "foreign")):
        train(folder / name, seed=seed)
    return folder


@pytest.fixture
def mine(runs, tmp_path):
    return shutil.copytree(runs / "mine", tmp_path / "mine")


def swap_in(run, foreign, name=NEWEST):
    shutil.rmtree(run / name, ignore_errors=True)
    shutil.copytree(foreign / name, run / name)


def test_every_checkpoint_and_the_directory_bear_the_name_of_the_run(mine, runs):
    name = read_run_id(mine)
    assert {read_manifest(folder).run for folder in mine.glob("step-*")} == {name}
    assert name != read_run_id(runs / "foreign")
    assert len(name) == 16


def test_a_whole_checkpoint_of_another_run_is_named_by_verify_and_list(mine, runs, capsys, tmp_path):
    assert main(["checkpoint", "verify", str(mine)]) == 0
    swap_in(mine, runs / "foreign")
    verify(mine / NEWEST)  # by itself it is whole
    for action in ("verify", "list"):
        assert main(["checkpoint", action, str(mine), "--json", str(tmp_path / "told")]) == 1
        told = json.loads((tmp_path / "told").read_text())["checkpoints"]
        assert [one["intact"] for one in told] == [True, True, False]
        assert told[-1]["problem"].startswith("foreign run in the directory: it is of run ")
        assert read_run_id(runs / "foreign") in told[-1]["problem"]
    assert f"{NEWEST}: foreign run in the directory" in capsys.readouterr().out


def test_a_resume_sets_it_aside_and_goes_on_from_its_own(mine, runs, caplog):
    swap_in(mine, runs / "foreign")
    with caplog.at_level(logging.WARNING, logger="samestep.checkpoint"):
        resumed, step, _ = train(mine, steps=2)
    assert (resumed, step) == (True, 2)
    (record,) = caplog.records
    assert (
        f"{mine / NEWEST} is not used, and quarantined as {NEWEST}.bad: foreign run in the directory" in record.message
    )
    assert (mine / f"{NEWEST}.bad").is_dir()


def test_a_later_step_of_another_run_is_no_shortcut(mine, runs, tmp_path):
    longer = tmp_path / "longer"
    train(longer, seed=0, steps=4)
    swap_in(mine, longer, "step-00000004")
    assert train(mine, steps=3)[:2] == (True, 3)


def test_where_only_foreign_checkpoints_are_left_the_run_stops(mine, runs):
    for folder in sorted(mine.glob("step-*")):
        swap_in(mine, runs / "foreign", folder.name)
    with pytest.raises(samestep.errors.CheckpointError, match=r"no checkpoint in .* can be trusted, 3 quarantined"):
        train(mine)


def test_the_name_is_carried_through_resumes(mine):
    name = read_run_id(mine)
    train(mine, steps=6)
    assert read_run_id(mine) == name
    assert {read_manifest(folder).run for folder in mine.glob("step-*")} == {name}


def names_seen(path, steps):
    with samestep.world(device="cpu") as world:
        state = samestep.checkpoint(path, world, every=1, model=torch.nn.Linear(2, 1))
        for _ in range(steps):
            state.commit()
        state.close()
        return bool(state.resumed), state._store.run


def test_all_ranks_of_any_number_know_the_same_name(tmp_path, two_ranks, three_ranks):
    lives = [two_ranks(names_seen, str(tmp_path), 2), three_ranks(names_seen, str(tmp_path), 1)]
    lives.append([names_seen(str(tmp_path), 1)])
    assert [{resumed for resumed, _ in life} for life in lives] == [{False}, {True}, {True}]
    assert {name for life in lives for _, name in life} == {read_run_id(tmp_path)}


def test_nothing_is_named_before_the_first_save(tmp_path):
    names_seen(tmp_path, 0)
    assert read_run_id(tmp_path) is None


def test_a_run_that_begins_anew_has_a_new_name(mine):
    before = read_run_id(mine)
    for folder in mine.glob("step-*"):
        shutil.rmtree(folder)
    train(mine, steps=1)
    assert read_run_id(mine) not in {None, before}
    assert main(["checkpoint", "verify", str(mine)]) == 0


def test_a_checkpoint_copied_into_a_new_directory_goes_on_there(mine, tmp_path):
    shutil.copytree(mine / NEWEST, tmp_path / "new" / NEWEST)
    assert train(tmp_path / "new", steps=4)[:2] == (True, 3)
    assert read_run_id(tmp_path / "new") == read_run_id(mine)
    assert main(["checkpoint", "verify", str(tmp_path / "new")]) == 0


def a_pipe(path):
    os.mkfifo(path)


def a_link(path):
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_bytes(bytes(range(256))),
        lambda path: path.write_text(f"{'ab' * 8} {'0' * 32}\n"),
        lambda path: os.truncate(path, 10),
        a_pipe,
        a_link,
    ],
    ids=["empty", "bytes", "forged", "cut", "pipe", "link"],
)
def test_a_name_that_is_unreadable_is_none_and_is_written_over(tmp_path, make):
    write_run_id(tmp_path, "ab" * 8)
    assert read_run_id(tmp_path) == "ab" * 8
    if make.__name__ in {"a_pipe", "a_link"}:
        (tmp_path / ".run").unlink()
    make(tmp_path / ".run")
    assert read_run_id(tmp_path) is None
    write_run_id(tmp_path, "cd" * 8)
    assert read_run_id(tmp_path) == "cd" * 8


def test_a_directory_whose_own_name_is_unreadable_takes_on_that_of_its_newest_checkpoint(mine):
    name = read_run_id(mine)
    os.truncate(mine / ".run", 10)
    assert train(mine, steps=4)[:2] == (True, 3)
    assert read_run_id(mine) == name


def test_what_a_kill_left_of_a_name_is_written_over(tmp_path):
    (tmp_path / ".run.tmp").write_text("half")
    write_run_id(tmp_path, "ab" * 8)
    assert read_run_id(tmp_path) == "ab" * 8
    assert not (tmp_path / ".run.tmp").exists()
