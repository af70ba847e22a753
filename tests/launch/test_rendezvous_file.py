"""Tasks that find the one that leads, through a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import threading
import time
from dataclasses import replace

import pytest

from samestep.errors import RendezvousError
from samestep.launch.hosts.rendezvous_file import STALE_S, START_MARKERS, rendezvous_path, wait_for, write
from samestep.rankenv import RankVariables

FACTS = {"addresses": ["10.0.0.1", "127.0.0.1"], "port": 4711, "token": "t" * 43}
TOLD = RankVariables(
    rank=1, size=4, local_rank=1, local_size=2, host_index=0, source="slurm", job="slurm-12-0", one_host=False
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in START_MARKERS:
        monkeypatch.delenv(name, raising=False)


def test_what_is_published_is_found(tmp_path):
    write(tmp_path / "here", FACTS)
    assert wait_for(tmp_path / "here", 0) == FACTS


def test_a_task_that_looks_early_waits_for_the_one_that_leads(tmp_path):
    context = multiprocessing.get_context("fork")
    early = context.Event()

    def look(answers):
        early.set()
        answers.send(wait_for(tmp_path / "here", 60))

    answers, theirs = context.Pipe(duplex=False)
    with answers, theirs:
        follower = context.Process(target=look, args=(theirs,))
        follower.start()
        assert early.wait(60)
        write(tmp_path / "here", FACTS)
        assert answers.recv() == FACTS
        follower.join()


def test_it_is_for_this_user_alone_and_nothing_else_is_left(tmp_path):
    write(tmp_path / "here", FACTS)
    assert stat.S_IMODE((tmp_path / "here").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_nobody_ever_reads_half_of_it(tmp_path):
    path, done = tmp_path / "here", threading.Event()
    many = [{"token": letter * 100_000} for letter in "ab"]
    write(path, many[0])

    def rewrite():
        while not done.is_set():
            for facts in many:
                write(path, facts)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(200):
            assert wait_for(path, 0) in many
    finally:
        done.set()
        writer.join()


def test_a_new_one_replaces_a_leftover(tmp_path):
    write(tmp_path / "here", {"port": 1})
    write(tmp_path / "here", FACTS)
    assert wait_for(tmp_path / "here", 0) == FACTS


def test_an_old_leftover_is_not_taken(tmp_path):
    path = tmp_path / "here"
    write(path, FACTS)
    old = time.time() - STALE_S - 1
    os.utime(path, (old, old))
    with pytest.raises(RendezvousError, match="did it start, and do all hosts share"):
        wait_for(path, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_what_somebody_else_has_put_there_is_refused(tmp_path):
    path = tmp_path / "here"
    path.write_text(json.dumps(FACTS))
    os.chown(path, 65534, 65534)
    with pytest.raises(RendezvousError, match="belongs to somebody else"):
        wait_for(path, 0)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RendezvousError, match=r"task 0 cannot say where it is, in .*missing/here: No such file"):
        write(tmp_path / "missing" / "here", FACTS)


def test_tasks_of_one_step_agree_on_the_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_LAUNCHER_PORT", "40001")
    place = rendezvous_path(TOLD)
    assert rendezvous_path(replace(TOLD, rank=3, local_rank=1, host_index=1)) == place
    assert place.parent == tmp_path
    assert place.name.startswith(".samestep-slurm-12-0-")


@pytest.mark.parametrize("one_host", [True, False])
def test_every_start_of_a_step_has_a_place_of_its_own(monkeypatch, one_host):
    told = replace(TOLD, one_host=one_host)
    places = [rendezvous_path(told), rendezvous_path(replace(told, job="slurm-12-1"))]
    for name in START_MARKERS:
        monkeypatch.setenv(name, "1")
        places.append(rendezvous_path(told))
    assert len(set(places)) == len(places)
