"""Ranks that meet through a file leave none behind, and find no leftovers of an earlier start."""

from __future__ import annotations

import socket
import time

import pytest
from test_world import finish, start

from samestep.errors import RendezvousError
from samestep.runtime import rendezvous
from samestep.runtime.store_messages import decode_registration

TRAIN = """
    import samestep, torch
    from torch.utils.data import TensorDataset
    with samestep.world({arguments}) as world:
        model = samestep.replicate(torch.nn.Linear(4, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = samestep.shards(TensorDataset(torch.ones(8, 4)), world, batch_size=4)
        state = samestep.checkpoint(None, world, every=1, model=model, optimizer=optimizer, data=batches)
        for epoch in state.epochs(1):
            for (x,) in batches:
                batches.mean(model(x).square().squeeze(1)).backward()
                optimizer.step(); optimizer.zero_grad(); state.commit()
    print(world.size)
"""
PMI = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


def slurm(rank, **more):
    """The variables of a task of srun, two of them on one node."""
    told = {"PROCID": rank, "LOCALID": rank, "STEP_NUM_TASKS": 2, "STEP_TASKS_PER_NODE": 2, "NODEID": 0}
    return {f"SLURM_{name}": str(value) for name, value in {**told, "JOB_ID": 2, "STEP_ID": 0, **more}.items()}


def mpi(rank):
    return {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank), **PMI}


def files(folder):
    return [path.name for path in folder.glob("samestep-*/*")]


@pytest.mark.parametrize("variables", [slurm, mpi])
def test_a_clean_run_under_srun_or_mpiexec_leaves_no_file(tmp_path, variables):
    ranks = [start(tmp_path, code=TRAIN, TMPDIR=str(tmp_path), **variables(rank)) for rank in range(2)]
    assert [(code, out) for code, out, _ in finish(*ranks)] == [(0, "2")] * 2
    assert list(tmp_path.glob("samestep-*"))  # it was here that they met
    assert not files(tmp_path)


def test_a_file_of_the_users_own_is_gone_after_a_clean_run_and_takes_the_next(tmp_path):
    where = f"init_method='file://{tmp_path}/meet', size=2, join_timeout=30"
    for _ in range(2):
        ranks = [start(tmp_path, f"{where}, rank={rank}", TRAIN) for rank in range(2)]
        assert [(code, out) for code, out, _ in finish(*ranks)] == [(0, "2")] * 2
        assert not (tmp_path / "meet").exists()


HOLD = """
    import pathlib, samestep
    from samestep.runtime import rendezvous
    held, made = [], rendezvous.FileStore
    rendezvous.FileStore = lambda path, size: held.append(made(path, size)) or held[-1]
    with samestep.world({arguments}) as world:
        assert held and (world.rank or not pathlib.Path(held[0].path).exists())
    print(world.size)
"""


def test_the_file_goes_though_torch_which_does_not_always_remove_it_still_holds_it(tmp_path):
    where = f"init_method='file://{tmp_path}/meet', size=2, join_timeout=30"
    ranks = [start(tmp_path, f"{where}, rank={rank}", HOLD) for rank in range(2)]
    assert [(code, out) for code, out, _ in finish(*ranks)] == [(0, "2")] * 2
    assert not (tmp_path / "meet").exists()


STAY = """
    import os, signal, samestep
    with samestep.world({arguments}) as world:
        print(world.rank, flush=True)
        signal.pause()
"""


def test_nothing_is_left_of_ranks_that_were_killed_once_they_had_met(tmp_path):
    ranks = [start(tmp_path, code=STAY, TMPDIR=str(tmp_path), **mpi(rank)) for rank in range(2)]
    assert sorted(rank.stdout.readline() for rank in ranks) == ["0\n", "1\n"]
    for rank in ranks:
        rank.kill()
        rank.communicate()
    assert not files(tmp_path)


def test_a_requeued_job_does_not_take_what_its_first_start_has_left_for_its_own(tmp_path):
    early = start(tmp_path, code=STAY, TMPDIR=str(tmp_path), **slurm(0))
    while not files(tmp_path):
        assert early.poll() is None
        time.sleep(0.02)
    early.kill()
    early.communicate()
    assert files(tmp_path)
    second, first = (
        start(tmp_path, code=TRAIN, TMPDIR=str(tmp_path), **slurm(rank, RESTART_COUNT=1)) for rank in (1, 0)
    )
    assert [(code, out) for code, out, _ in finish(first, second)] == [(0, "2")] * 2
    assert len(files(tmp_path)) == 1  # that of the start that was killed


@pytest.mark.parametrize(
    "value",
    [
        b"\x80\x04.",
        b"[" * 5000,
        b"[1, 2]",
        b'{"host": "a"}',
        b'{"host": "a", "pid": true, "size": 2}',
        b"1" * 99_999,
    ],
)
def test_what_a_stranger_writes_into_the_store_is_no_rank(value):
    with pytest.raises(RendezvousError, match="rank 3's registration in the store is malformed"):
        decode_registration(value, 3)


def test_a_store_that_was_told_and_does_not_answer_is_named_with_the_wait(monkeypatch):
    monkeypatch.setattr(rendezvous, "route_to", lambda _: None)
    point = rendezvous.Rendezvous(rank=1, size=2, method="file", path="/meet")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # and does not listen
        told = {"addresses": ["127.0.0.1"], "port": holder.getsockname()[1]}
        with pytest.raises(RendezvousError, match=r"rank 1 of 2 waited .* for rank 0 at host 127.0.0.1, port \d+"):
            rendezvous._connect_to(told, point, 0.3)


def test_a_rank_0_that_ends_before_it_has_told_its_address_is_named(tmp_path, monkeypatch):
    point = rendezvous.Rendezvous(rank=1, size=2, method="file", path=str(tmp_path / "meet"))
    file = rendezvous.FileStore(str(tmp_path / "meet"), 2)
    monkeypatch.setattr(rendezvous, "_register", lambda *_: [])
    with pytest.raises(RendezvousError, match="rank 0 has registered at file://.* not told rank 1 where its store is"):
        rendezvous._connect_via_file_store(file, point, 0.2)
